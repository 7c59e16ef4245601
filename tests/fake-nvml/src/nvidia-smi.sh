#!/bin/sh
# nvidia-smi, as far as the reset of a GPU needs it. Texts and exit codes are those of the real one (driver 550 and later).
machine='@MACHINE@'
library='@LIBRARY@'
# How a reset ends. It is read before the call is recorded: a test may change the machine as soon as it sees the call.
outcome=$(sed -n 's/^  "reset": "\([a-z_]*\)",*$/\1/p' "$machine")
call=$*
echo "$call" >>"${machine%.*}.calls"

# Waits as long as a test holds the tool at this moment: before or after what a call does.
hold() {
    while moment=$(cat "${machine%.*}.hold" 2>/dev/null) && case "$1 $call" in "$moment"*) true ;; *) false ;; esac; do
        : >"${machine%.*}.held"
        sleep 0.05
    done
}
hold before
trap 'hold after' EXIT

# The field $2 of the GPU with UUID $1.
field() {
    awk -v uuid="\"$1\"" -v name="\"$2\":" '
        $1 == "\"uuid\":" { here = index($2, uuid) == 1 }
        here && $1 == name { gsub(/[",]/, "", $2); print $2; exit }' "$machine"
}

# Sets it to $3.
change() {
    awk -v uuid="\"$1\"" -v name="\"$2\":" -v value="$3" '
        $1 == "\"uuid\":" { here = index($2, uuid) == 1 }
        here && $1 == name { sub(/: [^,]*/, ": " value) }
        { print }' "$machine" >"$machine.smi" && mv "$machine.smi" "$machine"
}

address() {
    printf '00000000:%02X:00.0' "$(field "$1" pci_bus)"
}

# Ends with $1: GPU $2 could not be reset, because of $3.
not_reset() {
    printf 'The following GPUs could not be reset:\n  GPU %s: %s\n' "$(address "$2")" "$3"
    if [ "$3" = 'In use by another client' ]; then
        printf '\n1 device is currently being used by one or more other processes (e.g., Fabric Manager, CUDA application, graphics application such as an X server, or a monitoring application such as another instance of nvidia-smi). Please first kill all processes using this device and all compute applications running in the system.\n'
    fi
    exit "$1"
}

reset() {
    case $outcome in
    hangs) exec sleep 1000 ;;
    busy) not_reset 255 "$1" 'In use by another client' ;;
    not_supported) not_reset 3 "$1" 'Not Supported' ;;
    fails) not_reset 255 "$1" 'Unknown Error' ;;
    primary)
        echo "GPU Reset couldn't run because GPU $(address "$1") is the primary GPU."
        exit 1
        ;;
    esac
    if [ "$(field "$1" persistence_mode)" = true ] || grep -qs -- "$library/" /proc/[0-9]*/maps; then
        not_reset 255 "$1" 'In use by another client'
    fi
    if [ "$outcome" = works ]; then
        change "$1" remap_pending false
        change "$1" recovery_action 0
    fi
    echo "GPU $(address "$1") was successfully reset."
    echo 'All done.'
}

known() {
    [ -n "$(field "$1" uuid)" ] || { echo 'No devices were found'; exit 6; }
}

case "$*" in
'--query-gpu=uuid,persistence_mode --format=csv,noheader')
    sed -n 's/^ *"uuid": "\(.*\)",*$/\1/p' "$machine" | while read -r uuid; do
        if [ "$(field "$uuid" persistence_mode)" = true ]; then mode=Enabled; else mode=Disabled; fi
        echo "$uuid, $mode"
    done
    ;;
'-pm 0 -i '* | '-pm 1 -i '*)
    known "$4"
    if [ "$2" = 1 ]; then value=true what=Enabled; else value=false what=Disabled; fi
    change "$4" persistence_mode $value
    echo "$what persistence mode for GPU $(address "$4")."
    echo 'All done.'
    ;;
'--gpu-reset -i '*)
    known "$3"
    reset "$3"
    ;;
*)
    echo "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help."
    exit 2
    ;;
esac
