"""The environment that envs/npu_common/install.sh made against what its packages need; and a live resolution."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
COMMON = ROOT / "envs" / "npu_common"
spec = importlib.util.spec_from_file_location("packages", COMMON / "packages.py")
assert spec is not None and spec.loader is not None
packages = sys.modules["packages"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(packages)

#: requirement of vllm-ascend -> why it is not met
NOT_MET = {
    "torch": "the simulated line",
    "torch-npu": "the simulated line",
    "torchvision": "the simulated line",
    "triton-ascend": "the simulated line has triton",
    "transformers": "the line's own version",
    "fastapi": "for vLLM's HTTP server, which no run starts",
    "torchaudio": "audio models",
    "quart": "the proxy of disaggregated prefill",
    "memfabric-hybrid": "the pool of KV caches",
    "memcache-hybrid": "the pool of KV caches",
    "arctic-inference": "speculative decoding by suffixes",
    "pandas-stubs": "types",
}


def unmet(package: str) -> dict[str, str]:
    """Requirements of an installed package without an installed version that fits."""
    results = {}
    for requirement in map(Requirement, importlib.metadata.requires(package) or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        if version == "not installed" or not requirement.specifier.contains(version, prereleases=True):
            results[packages.name_of(requirement.name)] = f"{requirement}: {version}"
    return results


@pytest.mark.parametrize("package", ["vllm", "mindspeed_rl", "torch_npu", "megatron-core", "transformers"])
def test_every_requirement_of_a_package_is_met(package: str) -> None:
    assert unmet(package) == {}


def test_requirements_of_vllm_ascend_that_are_not_met_are_known_with_the_reason() -> None:
    assert unmet("vllm-ascend").keys() <= NOT_MET.keys()


def test_vllm_has_no_kernels_of_another_device() -> None:
    files = importlib.metadata.files("vllm") or ()
    assert [str(file) for file in files if file.suffix == ".so"] == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("line", ["main", *(pytest.param(line, marks=pytest.mark.extra) for line in ("fallback", "cann85"))])
def test_hosts_can_install_the_line_from_wheels(line: str, tmp_path: Path) -> None:
    """With Python 3.11. `packages.py resolve` asks for every host; see also tests/unit/npu/test_installation.py."""
    reached = subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path), "wheel"])
    if reached.returncode != 0:
        pytest.skip("no package index can be reached; tests/unit/npu/test_installation.py reads the recorded result")
    machines = ["aarch64", "x86_64"] if line == "main" else ["aarch64"]  # of Ascend's servers most have the first
    hosts = [host for host in packages.LINES[line].hosts if host.python == "3.11" and host.machine in machines]
    assert [host.machine for host in hosts] == machines
    result = packages.resolve(line, hosts, recorded=True)
    for host in hosts:
        assert {"torch", "torch-npu", "torchvision", "scipy", "megatron-core", "ray"} <= set(result[host])
        assert result[host]["torch-npu"] == packages.pinned_version(line, "torch-npu")


@pytest.mark.slow
@pytest.mark.parametrize("line", ["main", "fallback"])
def test_what_vllms_sources_need_to_build_is_installed_before_it(line: str, tmp_path: Path) -> None:
    _, builds = packages._source_of_vllm(packages.pinned_version(line, "vllm"), tmp_path)
    text = (COMMON / "install.sh").read_text()
    first = re.search(r"(?m)^pip_install --upgrade (.*) -c", text)
    assert first is not None
    assert {packages.name_of(need) for need in builds} - {"torch"} <= set(first[1].split())  # torch is step 2


#: package of the record -> its name in the environment; MindSpeed is a folder
RECORDED = {
    "vllm_ascend": "vllm-ascend",
    "vllm": "vllm",
    "torch_npu": "torch-npu",
    "megatron": "megatron-core",
    "mindspeed": "",
}


@pytest.mark.parametrize("package", RECORDED)
def test_the_committed_record_of_a_package_is_what_the_installed_one_has(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "unit" / "npu"))
    import contract

    name, record = RECORDED[package], json.loads(contract.PINNED.read_text())[package]
    version, folder = importlib.metadata.version(name) if name else "core_r0.16.0", sysconfig.get_paths()["purelib"]
    if not name:
        folder = os.environ.get("MINDSPEED_SRC", "")
        if not folder:
            pytest.skip("MINDSPEED_SRC does not point to a checkout of MindSpeed core_r0.16.0")
    # names that some release has; tests/unit/npu/test_contract.py finds those of our code that none has
    names = {name for release in record.values() for name in (release["names"] if package == "mindspeed" else release)}
    made = contract.make_record({package: {version: folder}}, names)
    assert list(contract.differences({package: {version: record[version]}}, made)) == []
