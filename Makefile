# make demo    the whole loop on handwritten digits
# make test    checks and tests
# Both set everything up in .venv first.

.PHONY: demo test check setup clean

demo: setup
	@.venv/bin/paceline demo

test: setup
	@scripts/check
	@scripts/test

check: setup
	@scripts/check

setup:
	@scripts/setup

clean:
	rm -rf .venv build paceline-demo paceline-runs .coverage* .hypothesis .mypy_cache .pytest_cache .ruff_cache
