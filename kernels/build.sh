#!/usr/bin/env bash
# Compiles the SM90 kernels ahead of time into one library; needs nvcc (CUDA 12.4 or newer), no GPU and no torch.
#
#   kernels/build.sh [OUTPUT]      OUTPUT: default snapmla/lib/libsnapmla_sm90.so; NVCC, JOBS: which compiler, how many at once
#   kernels/build.sh --nvcc        print which nvcc that is
#
# The compiler is NVCC, else the nvcc on the path, else that of the package nvidia-cuda-nvcc (tools.lock) in the Python
# environment on the path.
#
# Spilled registers and local memory are errors: either means that a kernel is not what its design says.
set -euo pipefail
kernels=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
output=${1:-$kernels/../snapmla/lib/libsnapmla_sm90.so}
nvcc=$(command -v "${NVCC:-nvcc}" || true)
if [ -z "${NVCC:-}" ] && [ -z "$nvcc" ]; then
  packaged=("$(dirname "$(command -v python3)")"/../lib/python3*/site-packages/nvidia/cu13/bin/nvcc)
  if [ -x "${packaged[0]}" ]; then
    nvcc=$(readlink -f "${packaged[0]}")
    export LIBRARY_PATH=${nvcc%/bin/nvcc}/lib${LIBRARY_PATH:+:$LIBRARY_PATH}  # its profile names a folder that packages lack
  fi
fi
[ -n "$nvcc" ] || { echo "kernels/build.sh needs nvcc (CUDA 12.4 or newer), found none: set NVCC." >&2; exit 1; }
[ "$output" != --nvcc ] || { echo "$nvcc"; exit; }

objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
export nvcc objects
find "$kernels/sm90" -name '*.cu' -print0 | xargs -0 -P "${JOBS:-2}" -I {} bash -euo pipefail -c '
  "$nvcc" -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -Xcompiler -fPIC,-fvisibility=hidden -lineinfo \
    -Xptxas --warn-on-spills,--warn-on-local-memory-usage,--warning-as-error \
    -c "$1" -o "$objects/$(basename "$1" .cu).o"' _ {}
mkdir -p "$(dirname "$output")"
"$nvcc" -gencode=arch=compute_90a,code=sm_90a -shared -cudart static "$objects"/*.o -o "$objects/library.so"
mv "$objects/library.so" "$output"
echo "$output"
