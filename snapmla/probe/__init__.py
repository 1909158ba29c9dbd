"""The probe: a small byte-level MLA language model that the workflow trains itself, and what is measured on
it."""
