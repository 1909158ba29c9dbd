"""The workflow on a Slurm that the test starts on this machine: jobs, their resources, logs and failures.

Needs Debian's slurm-wlm and munge, which the test command does not install, and root: .ci/run installs them and runs this
file at its end. The daemons, their key and their configuration live in a folder of the test, in a mount
namespace of their own, and end with it.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import toy_project

TOOLS = ("slurmctld", "slurmd", "munged", "unshare")
MISSING = [tool for tool in TOOLS if shutil.which(tool, path="/usr/sbin:/usr/bin") is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons want root"),
]

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=4000 Gres=gpu:1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

# Starts the daemons, waits until the node is idle, runs its arguments and ends the daemons. Slurm finds its configuration in
# /etc/slurm, which is the test's folder here and nowhere else: Snakemake's jobs lose all variables named SLURM_*.
IN_NAMESPACE = """
set -u
PATH=$PATH:/usr/sbin
folder=$1; shift
mkdir -p /etc/slurm
mount --bind "$folder" /etc/slurm
dd if=/dev/urandom of="$folder/munge.key" bs=64 count=1 2>/dev/null
chmod 600 "$folder/munge.key"
munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munged.log" --seed-file="$folder/munged.seed"
slurmctld
slurmd
for _ in $(seq 60); do sinfo --noheader --format %T 2>/dev/null | grep -q idle && break; sleep 0.5; done
"$@"
status=$?
for daemon in slurmd slurmctld munged; do kill "$(cat "$folder/$daemon.pid")"; done
exit $status
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for found in sockets:
        found.bind(("127.0.0.1", 0))
    ports = [found.getsockname()[1] for found in sockets]
    for found in sockets:
        found.close()
    return ports


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """A folder with the configuration of a cluster of one node, two cores and a GPU that is none."""
    folder = tmp_path / "slurm"
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    host = socket.gethostname().split(".")[0]
    (folder / "slurm.conf").write_text(CONFIGURATION.format(host=host, ports=free_ports(2), folder=folder))
    (folder / "gres.conf").write_text(f"NodeName={host} Name=gpu File=/dev/null\n")
    folder.chmod(0o755)
    return folder


def snakemake(cluster: Path, project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        *("unshare", "--mount", "bash", "-c", IN_NAMESPACE, "-", cluster),
        *(sys.executable, "-m", "snakemake", "--workflow-profile", "workflow/profiles/slurm"),
        *("--slurm-status-command", "squeue", "--slurm-no-account", "--slurm-keep-successful-logs"),
        *("--slurm-init-seconds-before-status-checks", "2", "--seconds-between-status-checks", "2"),
        *("--default-resources", "mem_mb=500", "runtime=5", *arguments),
    ]
    return subprocess.run(
        [str(x) for x in command],
        cwd=project,
        env=toy_project.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


def test_experiments_run_as_jobs_and_failures_come_back(cluster: Path, tmp_path: Path) -> None:
    project = toy_project.build(tmp_path / "project")
    done = snakemake(cluster, project, "--", "fig4", "kernel_bench/kernel_bench.csv")
    assert done.returncode == 0, done.stdout + (cluster / "slurmctld.log").read_text()
    results = project / "results"
    assert (results / "figures" / "fig4.svg").is_file() and (results / "kernel_bench" / "kernel_bench.csv").is_file()
    submitted = done.stdout.count("has been submitted with SLURM jobid")
    assert submitted == 5  # probe, latents, fidelity, kernels, kernel_bench; fig4 is drawn here
    for experiment in ("fidelity", "kernel_bench"):
        (log,) = (results / ".snakemake" / "slurm_logs").glob(f"rule_{experiment}/*.log")
        assert f"snapmla.experiments.{experiment}" in log.read_text()
        assert (results / "logs" / f"{experiment}.log").stat().st_size

    experiment = project / "snapmla" / "experiments" / "quality.py"
    experiment.write_text(experiment.read_text().replace("    begin =", '    raise RuntimeError("no luck")\n    begin ='))
    done = snakemake(cluster, project, "--", "table1")
    assert done.returncode == 1 and "Error in rule quality" in done.stdout
    assert "RuntimeError: no luck" in done.stdout  # of the job's own log
    assert not (results / "tables" / "table1.md").exists() and not (results / "quality").exists()
