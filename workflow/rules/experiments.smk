# One rule per experiment: `python -m snapmla.experiments.<name>` makes the folder <name>/.

# What each needs of the others, what it makes beside run.json, and what it occupies. Two threads for what
# computes long, on larger machines too: sums in another order would change the last digits. A GPU for what
# measures on one. `data`: files that it reads beside its configuration.
EXPERIMENTS = {
    "kernels": dict(needs=[], makes=["kernels.csv"], data=KERNEL_SOURCES),
    "probe": dict(
        needs=[],
        makes=["model/config.json", "model/model.safetensors", "training.csv", "corpus.json"],
        threads=2,
    ),
    "latents": dict(
        needs=["probe/model/config.json", "probe/model/model.safetensors"],
        makes=["latents.safetensors", "latents.json", "heldout.csv"],
        threads=2,
    ),
    "distribution": dict(
        needs=["latents/latents.safetensors", "latents/latents.json"],
        makes=["ranges.csv", "histogram.csv", "mse.csv"],
    ),
    "fidelity": dict(
        needs=[
            "latents/latents.safetensors",
            "latents/latents.json",
            "probe/model/config.json",
            "probe/model/model.safetensors",
        ],
        makes=["layer_error.csv", "kernels.csv"],
        threads=2,
    ),
    "quality": dict(
        needs=["probe/model/config.json", "probe/model/model.safetensors"],
        makes=["quality.csv"],
        threads=2,
    ),
    "drift": dict(
        needs=["probe/model/config.json", "probe/model/model.safetensors"],
        makes=["drift.csv"],
        threads=2,
    ),
    "ablation": dict(
        needs=["latents/latents.safetensors", "latents/latents.json"],
        makes=["ablation.csv", "accumulation.csv"],
    ),
    "accumulation": dict(needs=["kernels/kernels.csv"], makes=["accumulation.csv", "kernels.csv"]),
    "kernel_bench": dict(needs=["kernels/kernels.csv"], makes=["kernel_bench.csv", "latency.csv", "ceilings.csv", "roofline.csv"], gpu=1),
    "throughput": dict(needs=["kernels/kernels.csv"], makes=["throughput.csv", "step_kernels.csv"], gpu=1),
    "serving": dict(
        needs=["kernels/kernels.csv", "probe/model/config.json", "probe/model/model.safetensors"],
        makes=["serving.csv"],
        gpu=1,
    ),
    "benchmarks": dict(needs=[], makes=["benchmarks.csv"]),  # wants a served model: only `snakemake benchmarks` runs it
}

if unknown := set(config["experiments"]) - set(EXPERIMENTS):
    raise WorkflowError(
        f"The key experiments must name some of {', '.join(EXPERIMENTS)}, got {sorted(unknown)[0]!r}."
    )


for name, experiment in ({} if REDRAW_ONLY else EXPERIMENTS).items():

    rule:
        name:
            name
        message:
            f"Experiment {name}"
        input:
            experiment["needs"],
        output:
            [f"{name}/{file}" for file in [*experiment["makes"], "run.json"]],
        params:
            module=f"snapmla.experiments.{name}",
            overrides=overrides(name),
            sources=sources(
                f"snapmla/experiments/{name}.py", *provenance.conf_files(name), *experiment.get("data", [])
            ),
        threads: experiment.get("threads", 1)
        resources:
            gpu=experiment.get("gpu"),  # None, not 0: a pod that asks for 0 may go to the GPUs' nodes
        log:
            f"logs/{name}.log",
        benchmark:
            f"logs/{name}.tsv"
        shell:
            "python3 -m {params.module} {params.overrides:q} 2>&1 | tee {log:q}"
