#!/usr/bin/env bash
# Make the Python environment of this checkout, keeping a usable torch that the machine already has.
#
#   bash setup_environment.sh [--training] [--monitor] [--ray] [--engines] [--gpu] [--test] [--docs] [--quiet]
#
#   --training       also the Trainer of transformers (accelerate), Lightning and TensorBoard
#   --monitor        also what `make monitor` needs (streamlit)
#   --ray            also what `evaluation.engine=ray` needs
#   --engines        also ONNX Runtime and OpenVINO, as variants of step 05 and peers of the benchmark
#   --gpu            also what `make gpu` needs (pytest, and --training)
#   --docs           also what `make docs` needs (mkdocs-material)
#   --test           also what `make test` and `make lint` need, all of the above included
#   --quiet          leave what the machine has to step 00 to say, unless it lacks something
#   BOUNDBY_VENV     where (default .venv; a relative path starts at this folder)
#   BOUNDBY_PYTHON   the Python to build on (default: the one of this machine that has a usable torch)
#
# Run it as often as you like: nothing is installed twice. Exit code 3: the machine lacks something.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null

venv=${BOUNDBY_VENV:-.venv}
python=$venv/bin/python
stamp=$venv/.boundby-ready  # a line per finished installation: the torch beside it and a sum of its locks
our_pin=$venv/.boundby-torch  # the pin of the torch that this script installed; absent beside one that was there before
pin=setup/requirements-torch.txt
wanted=(setup/locks/core.txt)
continue_with="make run"
quiet=
for argument in "$@"; do
    case $argument in
        --training | --monitor | --ray | --engines) wanted+=("setup/locks/${argument#--}.txt") ;;
        --gpu) wanted+=(setup/locks/{training,test}.txt) continue_with="make gpu" ;;
        --docs) wanted+=(setup/locks/docs.txt) continue_with="make docs" ;;
        --test) wanted+=(setup/locks/{training,monitor,ray,engines,docs,test}.txt) continue_with="make test" ;;
        --quiet) quiet=yes ;;
        -h | --help) sed -n '2,/^set/s/^# \{0,1\}//p' setup_environment.sh && exit 0 ;;
        *) echo "setup_environment.sh: unknown argument $argument;" \
            "known are --training, --monitor, --ray, --engines, --gpu, --test, --docs and --quiet" >&2; exit 2 ;;
    esac
done
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
unset PIP_CONSTRAINT  # NVIDIA's images pin their own numpy there; their torch stays, as no lock holds one

say() { echo "setup: $*" >&2; }
fail() { echo "setup_environment.sh: $*" >&2; exit 3; }
torch_of() { "$1" setup/gpu_and_torch.py; }  # prints version, CUDA build, path; code 3 and the reason if unusable

ready_line() {  # of these locks; another one whenever a file, the torch beside them or the driver under it changes
    local torch
    torch=$("$python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null) || return 1
    echo "torch $torch $(cat "$pin" "$@" /proc/driver/nvidia/version 2>/dev/null | cksum)"
}

find_base() {  # sets `base` to the first supported Python, better one with a usable torch, then described in `kept`
    local candidates=(python3 python python3.12 python3.11) candidate identity tried=""
    [[ -z ${BOUNDBY_PYTHON:-} ]] || candidates=("$BOUNDBY_PYTHON")
    base="" kept=""
    for candidate in "${candidates[@]}"; do
        identity=$("$candidate" -c 'import sys; print(*sys.version_info[:2], sys.prefix)' 2>/dev/null) || continue
        [[ $identity == 3\ 1[12]\ * && $tried != *"|$identity|"* ]] || continue
        tried+="|$identity|"
        base=${base:-$candidate}
        if kept=$(torch_of "$candidate"); then base=$candidate && return; fi
        kept=""
    done
    [[ -n $base ]] || fail "no Python 3.11 or 3.12 among: ${candidates[*]};" \
        "install one (apt-get install python3.12-venv) or name one: BOUNDBY_PYTHON=/path/to/python bash setup_environment.sh"
}

make_venv() {
    [[ ! -e $venv || -f $venv/pyvenv.cfg || -z $(ls -A -- "$venv") ]] ||
        fail "$venv holds something else than a virtual environment; remove it or set BOUNDBY_VENV to another place"
    find_base
    say "making $venv with $("$base" -c 'import sys; print(sys.executable, sys.version.split()[0])')"
    "$base" -m venv --clear ${kept:+--system-site-packages} "$venv" >&2 ||
        fail "$base cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"
    [[ -n $kept ]] || return 0
    "$python" -m pip uninstall -qy setuptools >/dev/null 2>&1 || true  # 3.11 puts 65 before the 77 that torch asks for
    [[ $(torch_of "$python" 2>/dev/null) != "$kept" ]] || return 0
    # The machine's Python is a virtual environment itself (Vast: /venv/main), which --system-site-packages passes over.
    local own path=${kept##*$'\t'}
    own=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    (cd -- "$(dirname -- "$path")/.." && pwd) >"$own/boundby-machine.pth"
    [[ $(torch_of "$python") == "$kept" ]] || fail "$venv does not see $path; name another Python in BOUNDBY_PYTHON"
}

install() {  # GB PIP_ARGUMENTS: installs when that much is free; prints a line per download
    local free_gb log=$venv/pip.log
    free_gb=$(($(df -Pk -- "$venv" | awk 'NR == 2 { print $4 }') / 1000000))
    ((free_gb >= $1)) ||
        fail "$free_gb GB free at $venv, about $1 GB needed; make room (pip cache purge) or set BOUNDBY_VENV elsewhere"
    "$python" -m pip install "${@:2}" 2>&1 | tee -- "$log" |
        { grep --line-buffered -oE 'Downloading .*whl \(.*[MG]B\)|^Installing collected packages' >&2 || true; } ||
        fail "pip failed: $(grep -m 1 '^ERROR' "$log") (all of it: $log); then the same command continues"
}

if line=$(ready_line "${wanted[@]}") && grep -Fxqs -- "$line" "$stamp"; then
    [[ -z $quiet ]] || exit 0
    "$python" setup/verify.py --skip-torch
    echo "next      $continue_with"
    exit 0
fi

if ! "$python" -c '' 2>/dev/null; then
    make_venv
elif ! "$python" -m pip --version >/dev/null 2>&1; then  # an earlier attempt was killed before it came to pip
    "$python" -m ensurepip >/dev/null || fail "$venv has no pip; on Debian and Ubuntu: apt-get install python3-venv"
fi
case $(df -PT -- "$venv" 2>/dev/null | awk 'NR == 2 { print $2 }') in
    nfs* | fuse* | ceph | lustre) say "$venv is on a network disk, slow for pip; BOUNDBY_VENV=/root/venv is faster" ;;
esac

if { [[ -f $our_pin ]] && ! cmp -s -- "$pin" "$our_pin"; } || ! before=$(torch_of "$python"); then
    choice=$("$python" setup/choose_torch.py) || fail "${choice:-see the lines above}"
    read -ra chosen <<<"$choice"
    say "installing ${chosen[*]:1}"
    install "${chosen[@]}"
    cp -- "$pin" "$our_pin"
    before=$(torch_of "$python") ||
        fail "torch is installed and cannot be used, see the line above; take another machine or install one that works"
fi
say "torch ${before%%$'\t'*} of ${before##*$'\t'} stays as it is; installing ${wanted[*]}"
install 2 --require-hashes --no-deps "${wanted[@]/#/-r}"
after=$(torch_of "$python") || true
[[ $after == "$before" ]] || fail "torch changed from '$before' to '$after'; remove $venv and run this again"
{
    ready_line "${wanted[0]}"
    for file in "${wanted[@]:1}"; do ready_line "${wanted[0]}" "$file"; done
    ready_line "${wanted[@]}"
} >"$stamp"
found=$("$python" setup/verify.py) || { echo "$found"; exit 3; }
[[ -z $quiet ]] || exit 0
echo "$found"
echo "next      $continue_with"
