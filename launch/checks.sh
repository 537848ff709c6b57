# shellcheck shell=bash
# Sourced by the launchers. Says what is wrong with how they were called, in one line, and exits with 2.

fail() {
    echo "error: $*" >&2
    exit 2
}

# need_config: TRAIN_CONFIG names a file.
need_config() {
    [ -n "${TRAIN_CONFIG:-}" ] || fail "TRAIN_CONFIG is not set: set it to a train config, such as" \
        "TRAIN_CONFIG=train_configs/llama3_8b_128k.toml"
    [ -f "$TRAIN_CONFIG" ] || fail "TRAIN_CONFIG = $TRAIN_CONFIG: no such file below $PWD; set it to a train config"
}

# need_number NAME VALUE: a whole number above 0.
need_number() {
    [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "$1 = $2 is not allowed: set it to a whole number above 0"
}

# need_flags FLAGS: they have the form of TorchTitan's, --section.key. What else is wrong with them, TorchTitan says,
# but only when all nodes run.
need_flags() {
    local flag
    for flag in "$@"; do
        [[ $flag != --* || $flag == --*.* ]] || fail "$flag is no flag of TorchTitan, whose flags read" \
            "--section.key, such as --training.steps 10 (--dry-run comes first; all else is set in the environment)"
    done
}

# show_command COMMAND: as a shell would read it.
show_command() {
    printf '%q ' "$@" | sed 's/ $/\n/'
}
