#!/bin/sh
# Stands where the MPS control program of the driver stands; the simulated machine has no MPS daemon yet.
case "${1:-}" in
    -v) printf '%s\n' "CUDA MPS control (simulated)" ;;
    *) printf '%s\n' "Cannot find MPS control daemon process"; exit 1 ;;
esac
