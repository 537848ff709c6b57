# shellcheck shell=bash
# Sourced by the commands that need an environment. Defines make_env and say.
#
# PYTHON  the interpreter that makes the environment (default: python3); at least 3.11
# VENV    where the environment is (default: .venv)

# Progress for people, on stderr: stdout is the command's own.
say() {
    echo "==> $*" >&2
}

# make_env FOLDER [EXTRA]: a virtual environment with this package in editable form, and the extra's packages.
# Does nothing if it was made by the same pyproject.toml and constraints.txt.
make_env() {
    local folder=$1 extra=${2:-}
    local stamp=$folder/.installed${extra:+-$extra}
    local python=${PYTHON:-python3}
    if [ ! -x "$folder/bin/python" ]; then
        if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "error: $python is not Python 3.11 or later: set PYTHON to one that is" >&2
            return 2
        fi
        say "making the environment $folder"
        "$python" -m venv "$folder"
    fi
    if [ "$stamp" -nt pyproject.toml ] && [ "$stamp" -nt constraints.txt ]; then
        return
    fi
    say "installing into $folder (minutes, if packages are to be downloaded)"
    "$folder/bin/python" -m pip install -qq -c constraints.txt -e ".${extra:+[$extra]}"
    touch "$stamp"
}
