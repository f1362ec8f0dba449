"""``tessera batch``: one question, or one for each row, over any number of pictures; results to a file.

The data's way, in bounded memory whatever the number of rows::

    source  rows of a .jsonl, a folder or a .parquet, read twice: once to count and check them, once to ask them
    job     a window of rows under way; their pictures are read when their turn comes, equal questions asked once
    asker   the SDK's; waits where servers are away, and finds the row that kills them
    journal a line for each row that is over, appended as it comes: what a later run need not ask again
    table   a journal as .parquet, written when all rows are over

A row is known by a digest of its id and of what it asks, so that results of another job are never taken for this one's.
Of each row about 60 bytes are held (its digest, the place of its line, a slot for its answer); of those under way the
pictures too.
"""
