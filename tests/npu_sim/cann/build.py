"""Builds the simulated CANN runtime next to an installed torch_npu wheel: one shared library under ten names, and the
extension that vllm-ascend's sleep mode needs.

python build.py OUTPUT_FOLDER
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("device.cpp", "memory.cpp", "aclop.cpp", "hccl.cpp")
#: every CANN library the wheel links or opens; all are the same file
LIBRARIES = (
    "libascendcl", "libhccl", "libhcomm", "libacl_op_compiler", "libge_runner", "libgraph", "libacl_tdt_channel",
    "libfmk_parser", "libascend_protobuf",
)  # fmt: skip
#: the secure string functions that CANN brings
SECURE_FUNCTIONS = ("vsnprintf_s", "snprintf_s", "strcpy_s", "strncpy_s", "memcpy_s", "memset_s", "sprintf_s", "strcat_s")
#: C functions of the runtime, C++ functions of the graph engine, secure functions
CANN_PREFIXES = ("acl", "Hccl", "rt", "Msprof", "_ZN2ge", "_ZNK2ge", *SECURE_FUNCTIONS)
CPLUSPLUS = ("g++", "-std=c++20", "-O2", "-fPIC", "-Wall", "-Wextra", "-Wno-unused-parameter")


def package_root() -> Path:
    """Folder of the installed torch_npu package, found without importing it."""
    file = importlib.metadata.distribution("torch_npu").locate_file("torch_npu")
    return Path(str(file))


def undefined_cann_symbols(package: Path) -> list[str]:
    """C symbols of CANN that the wheel's libraries need at load time."""
    libraries = [package / "lib" / f"{name}.so" for name in ("libtorch_npu", "libtensorpipe", "libnpu_profiler")]
    libraries += [*package.glob("_C*.so"), *(package / "dynamo" / "torchair" / "core").glob("*.so")]
    symbols: set[str] = set()
    for library in libraries:
        listing = subprocess.run(["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True)
        for line in listing.stdout.splitlines():
            kind, name = line.split()[-2:]
            if kind == "U" and name.startswith(CANN_PREFIXES):
                symbols.add(name.split("@")[0])
    return sorted(symbols)


def defined_symbols(objects: list[Path]) -> set[str]:
    """Names that object files define."""
    listing = subprocess.run(["nm", "--defined-only", *map(str, objects)], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in listing.stdout.splitlines() if line.strip()}


def stub_source(names: list[str]) -> str:
    """C++ of functions that end the process and say which one was called."""
    lines = ['extern "C" [[noreturn]] void npu_sim_unhandled(const char* name);']
    for number, name in enumerate(names):
        lines.append(f'extern "C" void stub_{number}() asm("{name}");')
        lines.append(f'extern "C" void stub_{number}() {{ npu_sim_unhandled("{name}"); }}')
    return "\n".join(lines) + "\n"


def build(output: Path) -> list[str]:
    """Compiles into `output` and returns the names that only have a loud stub."""
    package = package_root()
    output.mkdir(parents=True, exist_ok=True)
    include = package / "include"
    flags = ["-isystem", str(include), "-isystem", str(include / "third_party" / "acl" / "inc")]

    def compiled(source: Path) -> Path:
        target = output / f"{source.stem}.o"
        subprocess.run([*CPLUSPLUS, *flags, "-c", str(source), "-o", str(target)], check=True)
        return target

    objects = [compiled(HERE / name) for name in SOURCES]
    defined = defined_symbols(objects)
    missing = [name for name in undefined_cann_symbols(package) if name not in defined]
    stubs = output / "stubs.cpp"
    stubs.write_text(stub_source(missing))
    objects.append(compiled(stubs))
    library = output / "libnpu_sim.so"
    subprocess.run(["g++", "-shared", "-o", str(library), *map(str, objects), "-lpthread"], check=True)
    for name in LIBRARIES:
        link = output / f"{name}.so"
        link.unlink(missing_ok=True)
        link.symlink_to(library.name)
    python = ["-isystem", sysconfig.get_paths()["include"]]
    extension = ["-shared", str(HERE / "camem.cpp"), "-o", str(output / "vllm_ascend_C.so"), f"-L{output}", "-lascendcl"]
    subprocess.run([*CPLUSPLUS, *flags, *python, *extension], check=True)
    return missing


if __name__ == "__main__":
    stubbed = build(Path(sys.argv[1]))
    print(f"simulated CANN runtime built; {len(stubbed)} symbols have a stub that ends the process when called")
