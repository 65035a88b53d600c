#!/bin/sh
# The MPS server of a simulated machine: a process to be seen, which ends with its control daemon.
while read -r _; do :; done
