#!/bin/sh
# The MPS server of a simulated machine: a process to be seen, which ends with its control daemon unless it is
# told to linger, as a server with a hanging kernel does.
while read -r _; do :; done
while [ "${1:-}" = linger ]; do sleep 1; done
exit 0
