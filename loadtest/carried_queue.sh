#!/usr/bin/env bash
# For a lent machine with several GPUs, of which one command at a time can be sent: a queue of jobs with a worker for each
# GPU, which outlives the command. Each call adds the jobs that are new, waits, and brings back what ended since the last.
#   bash loadtest/carried_queue.sh ARCHIVE.tar.xz FOLDER SECONDS [JOB]
# ARCHIVE: carried_env.sh's, needed once. FOLDER has JOB.job files, scripts that run from the root of a tree with GPU (its
# number), OUT and FILES (FOLDER/files) set; a first line "# tree: NAME" names FOLDER/NAME.tar.xz (git archive) in place of
# the tree that came with the command. A name is run once. It returns after SECONDS, when nothing is left, or when JOB is
# done. OUT gets out.tar.xz: each job's log.txt and what it wrote, files above 3 MB cut off.
# Share a GPU only between jobs that wait: decoding is bound by memory, so three servers there take three times as long.
set -u
archive=$1 folder=$2 seconds=$3 wanted=${4:-}
queue=${TMPDIR:-/tmp}/tessera-queue
mkdir -p "$queue"/{new,run,done,known,trees,files,out}
bash loadtest/carried_server.sh "$archive" true || exit
[ -e "$queue/trees/main" ] || cp -r . "$queue/trees/main"
cp -r "$folder/files/." "$queue/files/" 2>/dev/null
for packed in "$folder"/*.tar.xz; do
    [ -e "$packed" ] && [ "$packed" != "$archive" ] || continue
    name=$(basename "$packed" .tar.xz)
    tree=$queue/trees/$name.$(md5sum < "$packed" | cut -c1-8)
    if [ ! -e "$tree" ]; then
        mkdir "$tree" && tar -C "$tree" -xf "$packed" && [ -e "$tree/build" ] || ln -s "$queue/trees/main/build" "$tree/build"
    fi
    ln -sfn "$tree" "$queue/trees/$name"
done
for job in "$folder"/*.job; do
    [ -e "$job" ] && [ ! -e "$queue/known/$(basename "$job")" ] && cp "$job" "$queue/known/" && cp "$job" "$queue/new/"
done

work() { # a GPU's number
    export GPU=$1 FILES=$queue/files OUT PYTHONUNBUFFERED=1
    while true; do
        job=$(ls "$queue/new" | head -1)
        # who moves it has it
        if [ -z "$job" ] || ! mv "$queue/new/$job" "$queue/run/$job" 2>/dev/null; then sleep 0.5; continue; fi
        OUT=$queue/out/${job%.job}
        tree=$queue/trees/$(sed -n '1s/^# tree: //p' "$queue/run/$job")
        [ "$tree" = "$queue/trees/" ] && tree=$queue/trees/main
        mkdir -p "$OUT"
        {
            echo "GPU $GPU, $(readlink -f "$tree"), $(date +%T)"
            cd "$tree" && bash loadtest/carried_server.sh "$archive" bash "$queue/run/$job"
            echo "exit code $?, $(date +%T)"
        } > "$OUT/log.txt" 2>&1
        mv "$queue/run/$job" "$queue/done/$job"
    done
}
for gpu in $(nvidia-smi --query-gpu=index --format=csv,noheader); do
    mkdir "$queue/worker.$gpu" 2>/dev/null || continue
    export -f work
    export queue archive
    setsid bash -c "work $gpu" > "$queue/worker.$gpu/log.txt" 2>&1 < /dev/null &
done

until [ $((seconds--)) -le 0 ] || [ -e "$queue/done/$wanted.job" ] || [ -z "$(ls "$queue/new" "$queue/run" | grep job)" ]; do
    sleep 1
done
for job in "$queue"/done/*.job; do
    name=$(basename "$job" .job)
    [ -e "$job" ] && mkdir "$queue/known/$name.told" 2>/dev/null && echo "== $name" && tail -c 700 "$queue/out/$name/log.txt"
done
echo "running: $(ls "$queue/run" | xargs)"
echo "waiting: $(ls "$queue/new" | xargs)"
nvidia-smi --query-gpu=index,power.draw,utilization.gpu --format=csv,noheader
find "$queue/out" -size +3M -type f -exec truncate -s 3M {} +
tar -C "$queue/out" -cf - . | xz -T0 -2 > "$OUT/out.tar.xz"
