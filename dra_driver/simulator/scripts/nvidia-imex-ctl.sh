#!/bin/sh
# The nvidia-imex-ctl of a simulated machine: it answers as the daemon that the machine has would.
#@FACTS@

fail() { code=$1; shift; printf '%s\n' "$*"; exit "$code"; }

query= socket=
while [ $# -gt 0 ]; do
    case $1 in
        -q) query=yes ;;
        -u) socket=$2; shift ;;
        --help | -h) fail 0 "Usage: nvidia-imex-ctl -u SOCKET -q (simulated machine $MACHINE)" ;;
        *) fail 1 "nvidia-imex-ctl: unknown option $1" ;;
    esac
    shift
done
[ -n "$query" ] || fail 1 "nvidia-imex-ctl: nothing to do"
[ -e "$socket" ] || fail 1 "Failed to connect to $socket: No such file or directory"
case $STATE in
    ready) printf '%s\n' READY ;;
    initializing) printf '%s\n' INITIALIZING ;;
    hung) while :; do sleep 60; done ;;
    *) fail 1 "Failed to connect to $socket: Connection refused" ;;
esac
