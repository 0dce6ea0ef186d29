# Sourced by the scripts beside it: makes and keeps the environment .venv of this checkout.
#
#   setup_env run    what the package itself needs
#   setup_env dev    that, and the tools of scripts/check and scripts/test
#
# A stamp in .venv remembers what was installed: while pyproject.toml and this file stay as they are, nothing is
# installed and no installer is started. Read from the environment:
#   BLOCKDRAFT_PYTHON        the Python to build .venv with (default: the first found of python3.11 .. python3.14, python3)
#   BLOCKDRAFT_TORCH_INDEX   a package index to take torch from, for instance PyTorch's own index of CPU builds

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
TORCH_REQUIREMENT="torch==2.13.0"
ORACLE_REQUIREMENT="dflash==0.1.0"

say() { printf '%s\n' "blockdraft: $*" >&2; }

find_python() {
    local candidate
    for candidate in ${BLOCKDRAFT_PYTHON:-python3.11 python3.12 python3.13 python3.14 python3}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    say "no Python 3.11 or newer found; install one, or name it: BLOCKDRAFT_PYTHON=/path/to/python $0"
    return 2
}

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }

# torch first and alone, so that no other requirement decides which build of it is taken.
install_torch() {
    if ! has_gpu && [[ -n "${BLOCKDRAFT_TORCH_INDEX:-}" ]]; then
        pip_install --index-url "$BLOCKDRAFT_TORCH_INDEX" "$TORCH_REQUIREMENT"
    else
        pip_install "$TORCH_REQUIREMENT"
    fi
}

pip_install() { "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

setup_env() {
    local want="$1" stamp="$VENV/blockdraft-stamp" key have="" python
    key="$(cat "$ROOT/pyproject.toml" "$ROOT/scripts/_env.sh" | cksum) $ROOT"
    [[ -f "$stamp" ]] && have="$(cat "$stamp")"
    if [[ "$have" == "dev $key" || "$have" == "$want $key" ]]; then
        return
    fi
    say "setting up .venv ($want): once, a few minutes"
    rm -f "$stamp"
    if ! "$VENV/bin/python" -c 'import sys; sys.exit(sys.prefix != sys.argv[1])' "$VENV" 2>/dev/null; then
        python="$(find_python)"
        "$python" -m venv --clear "$VENV"
    fi
    pip_install --upgrade "pip>=25.1"
    install_torch
    (cd "$ROOT" && pip_install --editable .)
    if [[ "$want" == dev ]]; then
        (cd "$ROOT" && pip_install --group dev)
        # The published reference, an oracle for tests. Without its dependencies: it pins other versions than ours.
        pip_install --no-deps "$ORACLE_REQUIREMENT"
    fi
    printf '%s %s' "$want" "$key" >"$stamp"
}
