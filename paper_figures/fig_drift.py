"""Divergence of FP8 caches from a BF16 one along a long teacher-forced decode (beyond the paper).

    python paper_figures/fig_drift.py --results results

Reads drift/drift.csv. Left: mean KL divergence of the next-token distribution; right: how often the likeliest token is
another one.
"""

from __future__ import annotations

from collections.abc import Sequence

import sources
from sources import Results
from style import WIDTH, badge, footer, log_axis, plt, save, variant_style

COLUMNS = ("variant", "prompt", "step_from", "step_to", "kl", "top1_agreement", "n", "source")


def build(results: Results) -> None:
    table = results.table("drift", "drift.csv", COLUMNS)
    labels = results.label("drift", table)
    fig, axes = plt.subplots(1, 2, figsize=(WIDTH, 2.4), layout="constrained")
    for variant, rows in table.groupby("variant", sort=False):
        rows = rows.sort_values("step_from")
        middle = (rows["step_from"] + rows["step_to"]) / 2
        axes[0].plot(middle, rows["kl"], ms=4, **variant_style(variant))
        axes[1].plot(middle, 100 * (1 - rows["top1_agreement"]), ms=4, **variant_style(variant))
    log_axis(axes[0])
    axes[0].set_ylabel("KL divergence, nats")
    axes[1].set_ylabel("another likeliest token, %")
    axes[1].set_ylim(bottom=0)
    for ax in axes:
        ax.set_xlim(left=0)
        ax.set_xlabel("decoded tokens")
        badge(ax, *labels)
    fig.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    prompts = ", ".join(f"{prompt:g}" for prompt in sorted(table["prompt"].unique()))
    footer(
        fig,
        f"{results.model('drift')}, teacher-forced behind a prompt of {prompts} tokens, against a BF16 cache; every step "
        f"caches what the variant's own hidden states made of the token. Means over {table['n'].min():.0f} tokens.",
    )
    save(fig, results.root, "fig_drift")


def main(argv: Sequence[str] | None = None) -> int:
    return sources.run(build, argv, __doc__)


if __name__ == "__main__":
    raise SystemExit(main())
