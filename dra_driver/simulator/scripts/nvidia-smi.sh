#!/bin/sh
# The nvidia-smi of a simulated machine. It needs a POSIX shell and nothing else, because it is mounted
# alone into containers. The facts about the machine are below, and a GPU or MIG device is shown if
# its device nodes are here.
#@FACTS@

self=$0
case $self in */usr/bin/nvidia-smi) prefix=${self%/usr/bin/nvidia-smi} ;; *) prefix= ;; esac
dev=${SIMULATOR_DEV:-$prefix/dev}
policy=$prefix/var/lib/nvidia-simulator
[ -d "$policy/timeslice" ] || policy=   # a container: settings of the GPU cannot be changed from here

fail() { code=$1; shift; printf '%s\n' "$*"; exit "$code"; }

usage() {
    printf '%s\n' "NVIDIA System Management Interface -- v$DRIVER_VERSION (simulated machine $MACHINE)" \
        "" \
        "    nvidia-smi                          table of GPUs" \
        "    nvidia-smi -L                       list of GPUs and MIG devices" \
        "    nvidia-smi --query-gpu=FIELDS --format=csv[,noheader][,nounits] [-i ID]" \
        "    nvidia-smi [-i ID] -c MODE          DEFAULT, PROHIBITED or EXCLUSIVE_PROCESS" \
        "    nvidia-smi [-i ID] -pm 0|1          persistence mode" \
        "    nvidia-smi --gpu-reset [-i ID]      without persistence mode, and while no other program has a GPU open" \
        "    nvidia-smi compute-policy [-i ID] --set-timeslice N | -l" \
        "    nvidia-smi --version"
}

# How far a device is visible: the nodes decide, as the driver's library does.
gpu_visible() { [ -e "$dev/nvidia$1" ]; }
mig_visible() { [ -e "$dev/nvidia$1" ] && [ -e "$dev/nvidia-caps/nvidia-cap$2" ] && [ -e "$dev/nvidia-caps/nvidia-cap$3" ]; }

# Whether -i selects the GPU: index, UUID, bus id, or nothing given.
selected() {
    [ -z "$ids" ] && return 0
    rest=$ids,
    while [ -n "$rest" ]; do
        id=${rest%%,*}; rest=${rest#*,}
        case $id in "$1"|"$2"|"$3"|"${3#0000}") return 0 ;; esac
    done
    return 1
}

policy_value() {
    value=0
    if [ -n "$policy" ] && [ -r "$policy/$1/$2" ]; then read -r value <"$policy/$1/$2" || :; fi
    [ -n "$value" ] || value=0
}

compute_mode_name() {
    policy_value compute-mode "$1"
    case $value in 2) value=Prohibited ;; 3) value=Exclusive_Process ;; *) value=Default ;; esac
}

# `-pm` takes effect here at once; the machine learns of it when a program opens or closes NVML.
persistence_name() {
    policy_value persistence "$1"
    case $value in 1) value=Enabled ;; 2) value=Disabled ;; *) value=$2 ;; esac
}

# on_gpu MINOR UUID NAME BUS_ID MEMORY_MIB USED_MIB MIG PENDING SERIAL COMPUTE_CAP PERSISTENCE LOST VIRTUALIZATION HELD POWER_LIMIT
on_gpu() {
    current=no
    gpu_visible "$1" || return 0
    [ "$command" != count ] || { visible=$((visible + 1)); return 0; }
    if [ "${12}" = lost ]; then
        selected none "$2" "$4" || return 0
        printf '%s\n' "Unable to determine the device handle for GPU$number: $4: GPU is lost.  Reboot the system to recover this GPU" >&2
        lost=1
        return 0
    fi
    index=$number; number=$((number + 1)); mig_number=0
    selected "$index" "$2" "$4" || return 0
    current=yes; hits=$((hits + 1))
    case $command in
        list) printf 'GPU %s: %s (UUID: %s)\n' "$index" "$3" "$2" ;;
        query) query_row "$@" ;;
        table) table_row "$@" ;;
        compute-mode)
            # What the real one cannot set is a warning to it, and no error.
            case $7,${13} in
                Enabled,*) printf '%s\n' "Setting compute mode to $wanted_name is not supported on a MIG-enabled device." \
                    "Treating as warning and moving on."; return 0 ;;
                *,vgpu) printf '%s\n' "Unable to set the compute mode for GPU $4: Not Supported" \
                    "Treating as warning and moving on."; return 0 ;;
            esac
            store compute-mode "$2" "$wanted"
            printf 'Set compute mode to %s for GPU %s.\n' "$wanted_name" "$4" ;;
        set-timeslice)
            # MIG mode, a virtual GPU, and parts before Volta have no such setting.
            case $7,${13},${10} in
                Enabled,*|*,vgpu,*|*,*,[1-6].*) fail 3 "Setting timeslice is Not Supported for GPU $4." ;;
            esac
            store timeslice "$2" "$wanted"
            printf 'Successfully set timeslice duration to %s for GPU %s.\n' "$wanted_name" "$4" ;;
        persistence)
            persistence_name "$2" "${11}"
            if [ "$value" = "$wanted_name" ]; then
                printf 'Persistence mode is already %s for GPU %s.\n' "$value" "$4"; return 0
            fi
            store persistence "$2" "$wanted"
            printf '%s persistence mode for GPU %s.\n' "$wanted_name" "$4" ;;
        may-reset)
            persistence_name "$2" "${11}"
            if [ "$value" = Enabled ] || [ "${14}" = held ] || in_use; then
                busy=$((busy + 1)); blocked="$blocked
  GPU $4: In use by another client"
            fi ;;
        reset)
            store reset "$2" 1
            printf 'GPU %s was successfully reset.\n' "$4" ;;
        list-timeslice)
            policy_value timeslice "$2"; timeslice_name "$value"
            printf 'GPU %s: %s (UUID: %s)\n    Timeslice: %s\n' "$index" "$3" "$2" "$wanted_name" ;;
    esac
    return 0
}

# on_mig PARENT_MINOR GI_CAP CI_CAP PROFILE UUID
on_mig() {
    [ "$command" = list ] && [ "$current" = yes ] && mig_visible "$1" "$2" "$3" || return 0
    printf '  MIG %-12sDevice %2d: (UUID: %s)\n' "$4" "$mig_number" "$5"
    mig_number=$((mig_number + 1))
}

store() {
    [ -n "$policy" ] || fail 4 "Unable to change $1 for GPU $2: Insufficient Permissions (only on the host)"
    case " $WITHOUT_EFFECT " in *" $2 "*|*" all "*) return 0 ;; esac
    printf '%s\n' "$3" >"$policy/$1/$2" 2>/dev/null || fail 4 "Unable to change $1 for GPU $2: Insufficient Permissions"
}

# Whether a program has NVML open: it holds the lock of its session.
in_use() {
    [ -n "$policy" ] || return 1   # `store` says why
    for session in "$policy"/sessions/*; do
        [ -e "$session" ] || continue
        flock -n "$session" true || return 0
    done
    return 1
}

timeslice_name() {
    case $1 in
        0) wanted_name=Default ;; 1) wanted_name=Short ;; 2) wanted_name=Medium ;; 3) wanted_name=Long ;;
        *) fail 2 "Invalid timeslice value '$1': use 0 (Default), 1 (Short), 2 (Medium) or 3 (Long)." ;;
    esac
}

query_row() {
    row=; fields_left=$fields,
    while [ -n "$fields_left" ]; do
        field=${fields_left%%,*}; fields_left=${fields_left#*,}; unit=
        case $field in
            index) cell=$index ;;
            uuid|gpu_uuid) cell=$2 ;;
            name|gpu_name) cell=$3 ;;
            pci.bus_id|gpu_bus_id) cell=$4 ;;
            memory.total) cell=$5; unit=MiB ;;
            memory.used) cell=$6; unit=MiB ;;
            memory.free) case $5 in '[N/A]') cell=$5 ;; *) cell=$(($5 - $6)) ;; esac; unit=MiB ;;
            mig.mode.current) cell=$7 ;;
            mig.mode.pending) cell=$8 ;;
            serial|gpu_serial) cell=$9 ;;
            compute_cap) cell=${10} ;;
            persistence_mode) persistence_name "$2" "${11}"; cell=$value ;;
            power.limit) cell=${15}; unit=W ;;
            driver_version) cell=$DRIVER_VERSION ;;
            compute_mode)
                compute_mode_name "$2"; cell=$value
                if [ "${13}" = vgpu ]; then cell='[N/A]'; fi ;;
            count) cell=$visible ;;
            utilization.gpu|utilization.memory) cell=0; unit=% ;;
            *) fail 2 "Field \"$field\" is not a valid field to query." ;;
        esac
        case $cell in '[N/A]') unit= ;; esac
        [ -n "$unit" ] && [ "$units" = yes ] && cell="$cell $unit"
        row=${row:+$row, }$cell
    done
    printf '%s\n' "$row"
}

query_header() {
    row=; fields_left=$fields,
    while [ -n "$fields_left" ]; do
        field=${fields_left%%,*}; fields_left=${fields_left#*,}
        if [ "$units" = yes ]; then
            case $field in memory.*) field="$field [MiB]" ;; utilization.*) field="$field [%]" ;; esac
        fi
        row=${row:+$row, }$field
    done
    printf '%s\n' "$row"
}

table_row() {
    persistence_name "$2" "${11}"; persistence=$value
    compute_mode_name "$2"
    printf '| %3s  %-28s %-8s | %-16s | %20s | %-17s %-8s |\n' "$index" "$3" "$persistence" "$4" "$6MiB / $5MiB" "$value" "$7"
}

walk() {
    number=0; hits=0; lost=0; current=no
    each_device
    if [ "$hits" = 0 ]; then
        [ "$lost" = 1 ] && exit 15
        [ -n "$ids" ] && fail 6 "No devices were found with id $ids."
        fail 6 "No devices were found"
    fi
    [ "$lost" = 0 ] || exit 15
}

# The real one looks for the driver before it looks at its arguments, but for -h.
case ${1:-} in -h|--help) usage; exit 0 ;; esac
[ "$DRIVER_LOADED" = yes ] || fail 9 "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is installed and running."

command=table; ids=; fields=; format=; wanted=; wanted_name=; units=yes
if [ "${1:-}" = compute-policy ]; then
    command=list-timeslice; shift
elif [ "${1:-}" = mig ] || [ "${1:-}" = topo ] || [ "${1:-}" = nvlink ]; then
    fail 2 "nvidia-smi $1 is not simulated; NVML answers the same questions."
fi

while [ $# -gt 0 ]; do
    case $1 in
        -L|--list-gpus) command=list ;;
        -i|--id) shift; ids=${1:-} ;;
        --id=*) ids=${1#*=} ;;
        -l|--list) command=list-timeslice ;;
        --set-timeslice) shift; command=set-timeslice; wanted=${1:-} ;;
        --set-timeslice=*) command=set-timeslice; wanted=${1#*=} ;;
        -r|--gpu-reset) command=reset ;;
        -pm) shift; command=persistence; wanted=${1:-} ;;
        --persistence-mode=*) command=persistence; wanted=${1#*=} ;;
        -c|--compute-mode) shift; command=compute-mode; wanted=${1:-} ;;
        --compute-mode=*) command=compute-mode; wanted=${1#*=} ;;
        --query-gpu=*) command=query; fields=${1#*=} ;;
        --format=*) format=${1#*=} ;;
        --version)
            printf '%s\n' "NVIDIA-SMI version  : $DRIVER_VERSION" "NVML version        : $NVML_VERSION" \
                "DRIVER version      : $DRIVER_VERSION" "CUDA Version        : $CUDA_VERSION"
            exit 0 ;;
        *) fail 2 "Invalid combination of input arguments. '$1' is not simulated; run nvidia-smi -h for help." ;;
    esac
    shift
done

[ -e "$dev/nvidiactl" ] || fail 255 "Failed to initialize NVML: Unknown Error"
case $command in
    query)
        case $format in
            csv*) ;;
            *) fail 2 "\"--format=\" switch is missing or is not csv." ;;
        esac
        case $format in *nounits*) units=no ;; esac
        compact=; rest=$fields
        while [ -n "$rest" ]; do
            case $rest in *' '*) compact=$compact${rest%%' '*}; rest=${rest#*' '} ;; *) compact=$compact$rest; rest= ;; esac
        done
        fields=$compact
        command=count; visible=0; each_device; command=query
        case $format in *noheader*) ;; *) query_header ;; esac
        walk ;;
    set-timeslice) timeslice_name "$wanted"; walk ;;
    compute-mode)
        case $wanted in
            0|DEFAULT) wanted=0; wanted_name=DEFAULT ;;
            2|PROHIBITED) wanted=2; wanted_name=PROHIBITED ;;
            3|EXCLUSIVE_PROCESS) wanted=3; wanted_name=EXCLUSIVE_PROCESS ;;
            *) fail 2 "Invalid compute mode '$wanted'." ;;
        esac
        walk; printf 'All done.\n' ;;
    persistence)
        case $wanted in
            0|DISABLED) wanted=2; wanted_name=Disabled ;;
            1|ENABLED) wanted=1; wanted_name=Enabled ;;
            *) fail 2 "Invalid persistence mode: $wanted" ;;
        esac
        walk; printf 'All done.\n' ;;
    reset)
        command=may-reset; busy=0; blocked=; walk
        if [ "$busy" != 0 ]; then
            devices='device is'; these='this device'
            [ "$busy" = 1 ] || { devices='devices are'; these='these devices'; }
            fail 255 "
The following GPUs could not be reset:$blocked

$busy $devices currently being used by one or more other processes (e.g., Fabric Manager, CUDA application, graphics application such as an X server, or a monitoring application such as another instance of nvidia-smi). Please first kill all processes using $these and all compute applications running in the system.
"
        fi
        command=reset; walk; printf 'All done.\n' ;;
    table)
        line='+-------------------------------------------------------------------------------------------------------------------+'
        printf '%s\n' "$line"
        printf '| NVIDIA-SMI %-18s  Driver Version: %-18s  CUDA Version: %-7s %24s |\n' "$DRIVER_VERSION" "$DRIVER_VERSION" "$CUDA_VERSION" "(simulated)"
        printf '%s\n' "$line"
        printf '| GPU  %-28s %-8s | %-16s | %20s | %-17s %-8s |\n' Name Persist. Bus-Id Memory-Usage "Compute Mode" MIG
        printf '%s\n' "$line"
        walk
        printf '%s\n' "$line" ;;
    *) walk ;;
esac
