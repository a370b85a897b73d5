# One command each; needs git, make and python3 with its venv module. Everything is installed inside this checkout.
PYTHON := .venv/bin/python
UV := .tools/bin/uv
# uv trusts the certificates of this machine: company networks have theirs.
export UV_SYSTEM_CERTS := 1
# CUDA's libraries are several GB, and of use only where a GPU is. GPU=1 installs them for a machine that shares these files.
GPU ?= $(shell nvidia-smi --list-gpus 2>/dev/null | head -1)
# JupyterLab's settings for a reader who has none: a link to a text shows its preview, and nothing asks the network for news.
export JUPYTER_CONFIG_PATH := $(CURDIR)/tools/jupyter
# Kernels and tests run in .venv, whichever environment the shell has active.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME
# Container images set this. Each of the tests' hundreds of processes would then compile every module that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup lab test check refresh site releases rules census engine train model tensors ladder stacks fusion-lab gpu gpu-bundle clean

help:     ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1 /p' Makefile | \
	while read -r name what; do printf 'make %-11s %s\n' "$$name" "$$what"; done

setup: .tools/uv ## install everything into this checkout (the other targets do it too; GPU=1: with CUDA's libraries)
	@$(UV) sync --locked $(if $(GPU),--extra gpu)

# uv itself, in the one version and with the hashes that tools/uv.txt gives.
.tools/uv: tools/uv.txt
	python3 -m venv --clear .tools
	.tools/bin/pip install --quiet --require-hashes --only-binary :all: --requirement tools/uv.txt
	@touch $@

lab: setup      ## open the chapters in JupyterLab (its options: ARGS="--port 9000")
	@echo "Starting JupyterLab; stop it with Ctrl-C, twice"
	@exec $(PYTHON) -m jupyterlab --config=tools/lab_config.py --allow-root \
		--LabApp.default_url=/lab/tree/notebooks/01_fp8_formats.ipynb $(ARGS)

test: setup     ## run every test: helpers, chapters and their outputs, site, JupyterLab, oldest JAX
	@# three files of tests at a time, by pytest-xdist: on two cores the third uses what waits leave
	$(PYTHON) -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

check: setup    ## re-run the chapters and compare their outputs with the committed ones (NB="01 03" for some)
	$(PYTHON) -m tools.outputs check $(NB)

refresh: setup  ## re-run the chapters and rewrite outputs and pairs (NB="01 03"; FROM=md or ipynb)
	$(PYTHON) -m tools.outputs refresh $(if $(FROM),--from $(FROM)) $(NB)

site: setup     ## build the chapters as a web site in _build/
	@$(PYTHON) -m tools.site.pyodide
	$(PYTHON) -m tools.site.build

releases: setup ## record what each JAX release makes of the same programs (ARGS="0.11.2" for one)
	$(PYTHON) -m tools.recorders.releases $(ARGS)

rules: setup    ## record what the programs on the pages of fp8lens' rules become (ARGS="--only relu" for some)
	$(PYTHON) -m tools.recorders.rule_programs $(ARGS)

census: setup   ## record what JAX's FP8 libraries become (3 GB; ARGS="--only qwix" for some)
	$(PYTHON) -m tools.recorders.census $(ARGS)

engine: setup   ## record what Transformer Engine's layers become (builds it once: 8 GB, 10 minutes; ARGS="--only NVFP4" for some)
	$(PYTHON) -m tools.recorders.engine $(ARGS)

train: setup    ## train a small transformer in each precision and record it (20 minutes; ARGS=--long for longer runs: 2 hours)
	$(PYTHON) -m tools.recorders.train $(ARGS)

model: setup    ## train the model that the chapter on inference quantizes, and keep its weights (5 minutes)
	$(PYTHON) -m tools.recorders.model

tensors: setup  ## record what one matmul's tensors look like while that model is trained (4 minutes)
	$(PYTHON) -m tools.recorders.tensors

ladder: setup   ## record what the rungs to a lean FP8 step cost and learn (20 minutes; ARGS="--only AdamW" for some)
	$(PYTHON) -m tools.recorders.ladder_costs $(ARGS)

stacks: setup   ## record what PyTorch, torchao and Triton make of one scaled matmul (5 GB; 2 minutes)
	$(PYTHON) -m tools.recorders.other_stacks

fusion-lab: setup ## record what XLA makes of the programs of the site's fusion lab (15 minutes; ARGS="--only few-rows" for some)
	$(PYTHON) -m tools.recorders.lab_programs $(ARGS)

gpu: setup      ## measure on the attached Hopper GPU, and record it (ARGS=--rehearse: on the CPU)
	$(PYTHON) -m tools.gpu $(ARGS)

gpu-bundle: setup ## write one folder with which a GPU machine without a network runs `make gpu`
	$(PYTHON) -m tools.gpu.bundle $(ARGS)

clean:    ## remove everything the other targets made
	rm -rf .tools .venv _build .pytest_cache
	find fp8lens helpers notebooks tests tools -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf
