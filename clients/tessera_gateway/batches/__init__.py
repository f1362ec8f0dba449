"""OpenAI's batches: /v1/files and /v1/batches, with all that they hold in one SQLite file.

The data's way, in bounded memory whatever the size of a file::

    routes    what is asked for; an upload, a form of multipart/form-data as it comes, becomes lines
    jobs      a file is its lines, each a row of the database: those of an upload, and those of results;
              a batch is the lines of its input that have no result yet, and where their results go
    service   what the routes and the runner share: both of these, and the waiting for room on the disk
    runner    asks the lines, several at a time; in the one of all workers that holds the folder's lock
    database  the SQLite file, the one thread of this process that uses it, and the folder's lock

A line is marked as over in the transaction that writes its result: it has one result, whatever is killed when. A
batch's state is what the database says, so a runner that starts goes on wherever another was killed.
"""
