import re

# One rule per figure and table: `python paper_figures/<name>.py` draws it from result files.

FIGURES = {  # and the experiments whose results each shows
    "fig1": ["throughput"],
    "fig1b": ["throughput"],
    "fig2": [],
    "fig3": ["distribution"],
    "fig4": ["fidelity"],
    "fig4b": ["fidelity"],
    "fig5": ["kernel_bench"],
    "fig6": ["kernel_bench"],
    "fig7": [],
    "algorithm1": [],
    "fig_accumulation": ["accumulation"],
    "fig_drift": ["drift"],
}
TABLES = {
    "table1": ["quality"],
    "table2": ["fidelity"],
    "table_kernels": ["kernel_bench"],
    "table_ablation": ["ablation"],
    "table_serving": ["serving"],
}
OPTIONAL = {"table1": ["benchmarks/benchmarks.csv"]}  # no input: `all` must never start the benchmarks
CLAIMS = {"claims": ["throughput", "kernel_bench", "distribution", "fidelity", "accumulation", "quality", "drift"]}

DRAWN = {  # the files of each; the first one stands in the report
    **{name: [f"figures/{name}.{kind}" for kind in ("svg", "pdf", "png")] for name in FIGURES},
    **{name: [f"tables/{name}.{kind}" for kind in ("html", "csv", "md", "tex")] for name in TABLES},
    "claims": ["claims.html", "claims.csv", "claims.md"],
}
CATEGORIES = dict.fromkeys(FIGURES, "Figures") | dict.fromkeys(TABLES, "Tables") | {"claims": "Claims"}

# Read by the scripts besides results: published values, and measurements recorded on other machines.
FIGURE_DATA = [*(ROOT / "paper_figures/published").glob("*.*"), *(ROOT / "results/recorded").glob("*/*.*")]


for name, shown in (FIGURES | TABLES | CLAIMS).items():

    rule:
        name:
            name
        message:
            f"Drawing {name}"
        input:
            results_of(*shown),
        output:
            report(
                DRAWN[name][0],
                caption=f"../report/{name}.rst",
                category=CATEGORIES[name],
                # "fig1b" -> "Fig 1b", "table_kernels" -> "Table kernels"
                labels={"item": re.sub(r"(?<=[a-z])_?(?=\d)|_", " ", name).capitalize()},
            ),
            DRAWN[name][1:],
        params:
            script=f"paper_figures/{name}.py",
            sources=sources(f"paper_figures/{name}.py", *FIGURE_DATA),
            optional=contents(*OPTIONAL.get(name, [])),
        localrule: True
        log:
            f"logs/{name}.log",
        benchmark:
            f"logs/{name}.tsv"
        shell:
            'python3 "$SNAPMLA_ROOT/{params.script}" --results . > {log:q} 2>&1'


rule figures:
    localrule: True
    input:
        DRAWN.values(),


# W&B's copy of what was drawn, in the group of the run that drew it. It cannot fail for want of a network.
rule track:
    message:
        "Logging figures, tables and claims to W&B"
    input:
        rules.figures.input,
    output:
        "logs/tracked.txt",
    localrule: True
    log:
        "logs/track.log",
    benchmark:
        "logs/track.tsv"
    shell:
        "python3 -m snapmla.tracking log-figures > {log:q} 2>&1 && date -u > {output:q}"
