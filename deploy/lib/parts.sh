# shellcheck shell=bash
# The parts of deploy/test: how long each took, and what the end of a run says. Sourced by deploy/test.

# What the process that runs the parts leaves for the one that prints the end.
parts_folder=$root/.dev/parts
log=$root/.dev/test.log

# Seconds from a fresh clone on a fresh machine with two cores, and where tools and dependencies are there.
gate_bound=1200 gate_bound_warm=840 all_bound=3600

# run_part KIND NAME COMMAND...: runs a part and records its time. KIND is check, environment or tests, and decides the exit status of a failure.
# With --part, others than the named one are left out, but for those that the rest needs. (Called plainly, never in a condition: there bash
# would not stop at the first failure inside of a function.)
run_part() {
    local begin=$SECONDS kind=$1 name=$2
    shift 2
    [ -z "$only_part" ] || [ "$only_part" = "$name" ] || [ "$kind" = environment ] || return 0
    printf '%s\t%s\n' "$kind" "$name" >"$parts_folder/current"
    say "$name"
    "$@"
    printf '%d\t%s\n' "$((SECONDS - begin))" "$name" >>"$parts_folder/times"
    rm "$parts_folder/current"
}

# start_beside NAME COMMAND...: runs a command beside the parts that follow. `finish_beside NAME`, a part, prints its output and waits for it.
declare -A beside=()
start_beside() {
    in_background "$parts_folder/$1.log" "${@:2}"
    beside[$1]=$job
}
# nicely COMMAND...: all that runs beside the command has precedence.
nicely() {
    renice --priority 10 --pid "$BASHPID" >/dev/null
    "$@"
}
finish_beside() {
    local status=0
    tail --lines=+1 --follow --sleep-interval=0.2 --pid="${beside[$1]}" "$parts_folder/$1.log"
    wait "${beside[$1]}" || status=$?
    return "$status"
}

# run_and_print_end COMMAND: runs the parts that COMMAND has. All of their output is in the log, and the end of the run is printed below.
run_and_print_end() {
    local status
    rm -rf "$parts_folder"
    mkdir -p "$parts_folder"
    # A pipeline in a condition would not stop at the first failure.
    set +e
    (
        set -e
        "$1"
    ) 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
    set -e
    print_end "$status"
}

# print_end STATUS: what a run has to say, and its exit status.
print_end() {
    local status=$1
    [ ! -s "$junit" ] || [ ! -e "$parts_folder/tests-ran" ] || report flaky
    if [ "$status" -ne 0 ]; then
        print_failure "$status"
        exit "$(exit_status "$status")"
    fi
    [ ! -e "$parts_folder/tests-ran" ] || { say "the slowest tests, in seconds" && report slowest; }
    print_times
    print_not_run
    if [ -n "$only_part" ] && ! grep -q "	$only_part\$" "$parts_folder/times"; then
        usage "there is no part '$only_part'"
    fi
    say "all passed"
}

report() { python3 "$root/deploy/lib/test_report.py" "$1" "$junit" || say "the report of the tests cannot be read: $junit"; }

# 1: a check, 2: the environment, 100: tests.
exit_status() {
    local kind=environment
    [ ! -e "$parts_folder/current" ] || IFS=$'\t' read -r kind _ <"$parts_folder/current"
    if [ "$kind" = environment ] || disk_is_full; then
        echo 2
    elif [ "$kind" = tests ] && [ "$1" -eq 100 ]; then
        echo 100
    else
        echo 1
    fi
}

disk_is_full() { grep -qaE 'No space left on device|os error 28|ENOSPC' <(last_part); }

# The output of the part that failed.
last_part() { awk '/^\033\[1m==>/ { n = 0 } { lines[n++] = $0 } END { for (i = 0; i < n; i++) print lines[i] }' "$log"; }

# print_failure STATUS: the part, what failed in it, the whole log, and the command that repeats it. At most 40 lines.
print_failure() {
    local kind=environment name="the start" names=
    [ ! -e "$parts_folder/current" ] || IFS=$'\t' read -r kind name <"$parts_folder/current"
    printf '\n'
    if [ "$kind" = tests ] && [ -s "$junit" ]; then
        report failed
        names=$(report names)
    else
        last_part | first_errors
    fi
    ! disk_is_full || say "the disk is full: $(df --output=avail,target --human-readable "$root" | tail -n 1 | awk '{ print $1 " are free on " $2 }')"
    printf 'gpuaas: failed after %d s: %s\n' "$SECONDS" "$name"
    printf '        the whole output: %s\n        again: %sdeploy/test%s --part %q%s\n' "$log" "${all:+TEST_SEED=$seed }" "${all:+ --all}" "$name" "$names"
}

# The lines of a failed part that say why: those from its first error on, and its last ones.
first_errors() {
    local output
    output=$(cat)
    { grep -aE -m 8 -A 4 '^(error|gpuaas:)|Error:|FAIL|✗' <<<"$output" || true; } | head -n 20 | cut -c1-180
    printf '        …\n'
    tail -n 12 <<<"$output" | cut -c1-180
}

# The parts, their sum and the bound. A part that takes over 20 % longer than at the last release (deploy/lib/part_times.tsv) is named.
print_times() {
    local seconds name recorded bound="the gate's bound on two cores is $gate_bound, and $gate_bound_warm where tools and dependencies are there"
    [ -z "$all" ] || bound="the bound on two cores is $all_bound"
    say "the parts, in seconds"
    while IFS=$'\t' read -r seconds name; do
        recorded=$(awk -F '\t' -v name="$name" '$2 == name { print $1 }' "$root/deploy/lib/part_times.tsv")
        printf '%8d  %s' "$seconds" "$name"
        [ -z "$recorded" ] || [ "$seconds" -le "$((recorded * 6 / 5 + 5))" ] || printf '  (grew: %d at the last release)' "$recorded"
        printf '\n'
    done <"$parts_folder/times"
    printf '%8d  together; %s\n' "$SECONDS" "$bound"
}
