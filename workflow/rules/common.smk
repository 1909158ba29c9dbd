# What the rules share: where results lie, the environment of the jobs, and what decides whether a result is
# still valid.
import hashlib

from snakemake.exceptions import WorkflowError

from snapmla import provenance, results

RESULTS = results.results_root(config["results_dir"])
RESULTS.mkdir(parents=True, exist_ok=True)

KERNEL_SOURCES = [file for file in (ROOT / "kernels").rglob("*") if file.suffix in (".cu", ".cuh", ".h", ".sh")]

# `snakemake figures` takes the experiments' files as they are: their rules are left out.
REDRAW_ONLY = "figures" in sys.argv[1:]

# The jobs' environment holds what may change without making a result invalid: which Python runs, where things
# lie, how runs are tracked and grouped.
os.environ.update(
    PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    SNAPMLA_ROOT=str(ROOT),
    SNAPMLA_RESULTS=str(RESULTS),
    SNAPMLA_LIBRARY=str(RESULTS / "kernels" / "libsnapmla_sm90.so"),  # what the rule kernels compiles
    SNAPMLA_RUN_GROUP=os.environ.get("SNAPMLA_RUN_GROUP", f"workflow {datetime.now(timezone.utc):%F %T}"),
)
if config["tracking"]:
    os.environ.update(WANDB_MODE=config["tracking"])

# The executor plugin for Kubernetes takes it that pods share no files, whatever --shared-fs-usage says, and would copy each
# through a storage plugin that each pod installs from a package index. Ours share the results folder, which is a volume, and
# have the sources and the environment in their image.
if kubernetes := sys.modules.get("snakemake_executor_plugin_kubernetes"):
    kubernetes.common_settings.implies_no_shared_fs = False


def sources(script, *data):
    """Digest of a script, the modules that it imports and its data: contents decide, not a clone's times."""
    return provenance.digest(ROOT, ROOT / script, *data)


def contents(*files):
    """Digests of result files that are shown where they are there, but that nothing which shows them makes."""
    found = [RESULTS / file for file in files if (RESULTS / file).is_file()]
    return [hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in found]


def overrides(experiment):
    """Hydra overrides of one experiment, checked against its dataclass before anything runs."""
    values = dict(config["experiments"].get(experiment, {}))
    if config["seed"] is not None:
        values.setdefault("seed", config["seed"])
    if not values:
        return []
    from snapmla.experiments._app import as_overrides, check_overrides

    try:
        check_overrides(experiment, as_overrides(values))
    except ValueError as error:
        raise WorkflowError(str(error)) from None
    return as_overrides(values)


def results_of(*experiments):
    """The tables of experiments, and the run.json that says where they come from: what figures show."""
    return [
        f"{name}/{file}"
        for name in experiments
        for file in [*EXPERIMENTS[name]["makes"], "run.json"]
        if file.endswith((".csv", "run.json"))
    ]
