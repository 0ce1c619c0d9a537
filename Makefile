# The verbs of `slimqwen` under the names of the pipeline; `slimqwen --help` lists the others. VARIANT names a folder of experiments/.
VARIANT ?= tiny
PYTHON  ?= python3
RUN      = .venv/bin/slimqwen
READY   := .venv/slimqwen-install.json
.DEFAULT_GOAL := help
# $(call option,PORT,--port): the option, where the variable is set.
option   = $(if $($(1)),$(2) '$($(1))')
IMAGE    = $(call option,PLATFORM,--platform) $(call option,CONTAINER_TOOL,--container-tool) $(call option,TAG,--tag)
CONTEXT  = $(call option,BASE_IMAGE,--base-image) $(call option,WHEELHOUSE,--wheelhouse)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: ## make .venv from the exact lock (PLATFORM=cpu|cuda; default: what this machine has; EXTRAS=ray; FROM=folder of a pack)
	@$(PYTHON) scripts/install.py $(call option,PLATFORM,--platform) $(call option,EXTRAS,--extras) $(call option,FROM,--from)

pack: ## what a host without a network lacks, in parts of 40 MB (PLATFORM=cpu|cuda HOST=packages.json GPU=h100 PYTHON_VERSION=3.12 TO=folder)
	@$(PYTHON) scripts/pack.py $(call option,PLATFORM,--platform) $(call option,HOST,--host) $(call option,GPU,--gpu) $(call option,PYTHON_VERSION,--python-version) $(call option,TO,--to)

package: install ## dist/slimqwen-….whl with all that is shipped: `uv pip install` it, then `slimqwen install`
	@.venv/bin/python scripts/package.py

demo: install ## the whole pipeline on the embedded model: calibrate, serve, score, time, compare (MODEL=smollm2 DATA=folder: on a real one)
	@$(RUN) demo $(call option,MODEL,--model) $(call option,DATA,--data)

optimise: install ## from a model's name to the fastest server that is proven as good (MODEL=owner/name|folder|file.gguf|variant HOURS=n DISK=GB CONTEXT=n SEQUENCES=n FOR=speed|memory CORPUS=… EVALUATION=… YES=1)
	@$(RUN) optimise '$(MODEL)' $(call option,HOURS,--hours) $(call option,DISK,--disk) $(call option,CONTEXT,--context) $(call option,SEQUENCES,--sequences) $(call option,FOR,--for) $(call option,CORPUS,--corpus) $(call option,EVALUATION,--evaluation) $(call option,GPU,--gpu) $(if $(YES),--yes)

test: install ## every test that takes minutes at most (KINDS=1: those inside vLLM's processes, on each kind of CPU that this host can play)
	@.venv/bin/python -m $(if $(KINDS),tests.cpu_kinds,pytest -n 2 --dist loadgroup --no-loadscope-reorder)

test-image: install ## build a CPU image, look into it, start it, break it (root; 40 minutes, 25 GB)
	@.venv/bin/python -m pytest -m image

gpu-check: | $(READY) ## every claim about a GPU, tried on this one in steps of 3 minutes (STEPS=b,a FRESH=1; REHEARSE=1: here, on the CPU)
	@.venv/bin/python -m pytest -m gpu tests/gpu/test_gpu_check.py

lint: | $(READY) ## ruff (lint and format), mypy, import-linter, links between documents
	@.venv/bin/ruff check && .venv/bin/ruff format --check && .venv/bin/mypy && .venv/bin/lint-imports && .venv/bin/python scripts/check_links.py

download: | $(READY) ## get VARIANT's checkpoint from the model hub
	@$(RUN) download --variant $(VARIANT)

shape: | $(READY) ## write weights/shape-VARIANT: the dimensions that VARIANT will have, without weights, to time them (load_format=dummy)
	@$(RUN) recipe run --variant $(VARIANT) --shape

datasets: | $(READY) ## get the data sets of SUITE=core into data/ (HF_TOKEN for the gated GPQA; DATA=folder that holds those of SUITE=general)
	@$(RUN) download --suite $(or $(SUITE),core) $(call option,DATA,--data)

serve: | $(READY) ## serve VARIANT with vLLM (PORT=8080, PLATFORM=cpu|cuda, REQUIRE_BAKED=1, REQUIRE_PLAN=1, ALLOW_UNSAFE=1, HOST=0.0.0.0, ALLOW_OPEN=1)
	@exec $(RUN) serve --variant $(VARIANT) $(call option,PORT,--port) $(call option,PLATFORM,--platform) $(call option,REQUIRE_BAKED,--require-baked) $(call option,REQUIRE_PLAN,--require-plan) $(call option,ALLOW_UNSAFE,--allow-unsafe) $(call option,HOST,--host) $(call option,ALLOW_OPEN,--allow-open)

recipe: | $(READY) ## run VARIANT's recipe.yaml into weights/VARIANT
	@$(RUN) recipe run --variant $(VARIANT)

calibrate: | $(READY) ## run VARIANT's recipe up to its AWQ calibration
	@$(RUN) recipe run --variant $(VARIANT) --until calibrate

prune-vocab: | $(READY) ## run VARIANT's recipe up to its vocabulary pruning
	@$(RUN) recipe run --variant $(VARIANT) --until prune_vocab

redistill: | $(READY) ## run VARIANT's recipe up to the training of its MTP head
	@$(RUN) recipe run --variant $(VARIANT) --until redistill_mtp

bake-cache: | $(READY) ## run VARIANT's recipe up to the packing of its compile cache
	@$(RUN) recipe run --variant $(VARIANT) --until bake_cache

eval-quality: | $(READY) ## score VARIANT on the items that decide at the margins (SUITE=core LIMIT=150 PORT=8080)
	@$(RUN) eval quality --variant $(VARIANT) $(call option,SUITE,--suite) $(call option,LIMIT,--limit) $(call option,PORT,--port)

eval-quality-full: | $(READY) ## score VARIANT on every item (SUITE=core PORT=8080)
	@$(RUN) eval quality --variant $(VARIANT) --full $(call option,SUITE,--suite) $(call option,PORT,--port)

eval-latency: | $(READY) ## time VARIANT over WORKLOAD=classes|arrivals|poisson|… (BASELINE=1: in turns with its baseline)
	@$(RUN) bench latency --variant $(VARIANT) $(call option,WORKLOAD,--workload) $(if $(filter 1,$(BASELINE)),--baseline) $(call option,ROUNDS,--rounds) $(call option,PORT,--port)

gate: | $(READY) ## is VARIANT as good as its baseline? fidelity, acceptance, quality, engine: one verdict
	@$(RUN) gate --variant $(VARIANT)

search: | $(READY) ## find the fastest variant of BASE for a GPU within its quality budget, and prove it (BASE=tiny GPU=a10g CANDIDATES=n)
	@$(RUN) search --base $(or $(BASE),tiny) --gpu $(or $(GPU),a10g) $(call option,CANDIDATES,--candidates)

tune: | $(READY) ## do drafts pay here? every way to speculate for VARIANT, in turns with none (LOAD=1,4,16 MINUTES=30 APPLY=name)
	@$(RUN) tune --variant $(VARIANT) $(call option,LOAD,--load) $(call option,MINUTES,--minutes) $(call option,APPLY,--apply)

compare: | $(READY) ## print the paired tables of two variants (A=tiny B=tiny-awq)
	@$(RUN) compare $(A) $(B)

report: | $(READY) ## report/index.html: what to serve, the leaderboard, each variant
	@$(RUN) report

build: | $(READY) ## VARIANT as a container image (BASE_IMAGE=name@sha256:…|debootstrap PLATFORM=cpu|cuda CONTAINER_TOOL=… TAG=… WHEELHOUSE=folder)
	@$(RUN) image build --variant $(VARIANT) $(IMAGE) $(CONTEXT)

build-import: | $(READY) ## as build, with the compile cache of another host (CACHE=compile_cache.tar.gz, its manifests beside it, SHA256=that of the archive)
	@$(RUN) image build --variant $(VARIANT) --cache '$(CACHE)' $(call option,SHA256,--trust-cache) $(IMAGE) $(CONTEXT)

verify-image: | $(READY) ## look into VARIANT's image without a GPU; one for a CPU is started and asked
	@$(RUN) image verify --variant $(VARIANT) $(IMAGE)

# Whatever needs .venv makes it where it is missing, unfinished, or was made in another folder.
$(READY):
	@$(PYTHON) scripts/install.py
ifneq ($(shell sed -n 2p .venv/slimqwen-made-for 2>&1)/,$(dir $(realpath .venv)))
.PHONY: $(READY)
endif

.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST)))
