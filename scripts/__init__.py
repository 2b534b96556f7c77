"""Programs for those who work on ORÁCULO: `make docs` and `make check` run the first of them."""
