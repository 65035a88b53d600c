#!/bin/sh
# A CUDA program of a simulated machine, as far as MPS sees it: connects as the CUDA library would, prints the
# limits in its environment, and stays connected with --hold until it is ended. Needs a POSIX shell and nothing else.
#
#     mps-client [--hold [SECONDS]]
#
# Without a pipe directory it says mps=none, as CUDA silently runs without MPS then.
hold=; [ "${1:-}" = --hold ] && hold=${2:-2147483647}
pipe=${CUDA_MPS_PIPE_DIRECTORY:-/tmp/nvidia-mps}
dir=$pipe/simulated

if [ ! -p "$dir/connect" ]; then
    printf '%s\n' "mps=none" "reason=no MPS pipe at $pipe"
    exit 3
fi
host=$(cat /proc/sys/kernel/hostname 2>/dev/null || echo host)
name=$host-$$
reply=$dir/reply-$name
rm -f "$reply"
# Open the pipe for reading as well: opening a pipe without a reader would block.
exec 3<>"$dir/connect" || exit 3
# Before it connects: it is listed from then on, and may be ended at any moment.
leave() { printf 'disconnect %s\n' "$name" >&3; exit 0; }
trap leave TERM INT HUP
printf 'connect %s %s\n' "$name" "$$" >&3
tries=0
while [ ! -f "$reply" ]; do
    tries=$((tries + 1))
    if [ "$tries" -gt 1200 ]; then
        printf '%s\n' "mps=none" "reason=the MPS daemon of $pipe does not answer"
        exit 3
    fi
    sleep 0.05 2>/dev/null || sleep 1
done
cat "$reply"
rm -f "$reply"
printf '%s\n' "active_thread_percentage=${CUDA_MPS_ACTIVE_THREAD_PERCENTAGE:-}" \
    "pinned_device_mem_limit=${CUDA_MPS_PINNED_DEVICE_MEM_LIMIT:-}"
if [ -n "$hold" ]; then
    sleep "$hold" & wait $!
    kill $! 2>/dev/null
fi
leave
