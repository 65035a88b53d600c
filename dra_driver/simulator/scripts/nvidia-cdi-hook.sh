#!/bin/sh
case "$1" in
    --help | -h | help) ;;
    *)
        printf '%s\n' "nvidia-cdi-hook of the simulated driver @VERSION@: $1"
        exit 0
        ;;
esac
printf '%s\n' \
    'NAME:' '   NVIDIA CDI Hook' '' \
    'VERSION:' '   1.20.2' '' \
    'COMMANDS:' \
    '   update-ldcache                    Update ldcache in a container' \
    '   create-symlinks                   Create symlinks in a container' \
    '   chmod                             Set the permissions of folders in a container' \
    '   enable-cuda-compat                Prefer newer CUDA libraries of the image' \
    '   disable-device-node-modification  Keep programs from making device nodes' \
    '   update-application-profile        Show EGL the GPUs of the container only' \
    '   help, h                           Shows a list of commands'
