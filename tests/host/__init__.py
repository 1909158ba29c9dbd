"""The decode kernels' own source as a library for the CPU (simt.h), to be called through `snapmla.native`."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"


def build(folder: Path) -> Path:
    """Compile into `folder`; returns the library. The sources are copied and changed in two places that are no C++:
    kernel launches and the declaration of dynamic shared memory."""
    source = folder / "source"
    shutil.copytree(KERNELS / "sm90" / "decode", source / "sm90" / "decode")
    shutil.copytree(HERE / "common", source / "common")
    for name in ("simt.h", "library.cpp"):
        shutil.copy(HERE / name, source)
    shutil.copy(KERNELS / "snapmla.h", source)
    for name in ("layout.cuh", "descriptor.cuh"):  # plain C++
        shutil.copy(KERNELS / "common" / name, source / "common")
    shutil.copytree(HERE / "shim", source / "shim")
    for path in (source / "sm90").rglob("*.cu*"):
        text = path.read_text().replace("extern __shared__", "extern")
        text = re.sub(
            r"(\w+)<<<([^,]+), ([^,]+), .*?>>>\((.*?)\);",
            r"host::run(dim3(\2), \3, [&] { \1(\4); });",
            text,
            flags=re.DOTALL,
        )
        path.write_text(text)
    library = folder / "host_kernels.so"
    flags = ["-std=c++20", "-O2", "-shared", "-fPIC", "-pthread", "-w", "-I", source, "-I", source / "shim"]
    subprocess.run(["g++", *flags, source / "library.cpp", "-o", library], check=True)
    return library
