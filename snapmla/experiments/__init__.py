"""The paper's experiments, one Hydra application each: ``python -m snapmla.experiments.NAME key=value``."""
