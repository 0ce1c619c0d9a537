# Every user action. Each line calls one script; VARIANT names a folder of experiments/.
VARIANT ?= tiny
PYTHON  ?= python3
RUN     := .venv/bin/python
INSTALLED := .venv/slimqwen-install.json
PORT    ?=
LIMIT   ?=
# What an image is built and found by.
IMAGE    = $(if $(PLATFORM),--platform $(PLATFORM)) $(if $(CONTAINER_TOOL),--container-tool $(CONTAINER_TOOL)) $(if $(TAG),--tag $(TAG))
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: ## make .venv from the exact lock (PLATFORM=cpu|cuda; default: what this machine has)
	@$(PYTHON) scripts/install.py $(if $(PLATFORM),--platform $(PLATFORM))

# Whatever needs .venv makes it where it is missing, or was not made to its end.
$(INSTALLED):
	@$(PYTHON) scripts/install.py

demo: install ## the whole pipeline on the embedded model: calibrate, serve, score, time, compare
	@$(RUN) scripts/demo.py

variants: ## list the variants: hypothesis, baseline, weights, latest figures
	@$(RUN) scripts/variants.py

serve: ## serve VARIANT with vLLM (PORT=8080, PLATFORM=cpu|cuda, REQUIRE_BAKED=1, ALLOW_UNSAFE=1)
	@exec $(RUN) scripts/serve.py --variant $(VARIANT) $(if $(PORT),--port $(PORT)) $(if $(PLATFORM),--platform $(PLATFORM)) \
		$(if $(REQUIRE_BAKED),--require-baked $(REQUIRE_BAKED)) $(if $(ALLOW_UNSAFE),--allow-unsafe $(ALLOW_UNSAFE))

watch: ## show what runs here: recipes, evaluations, servers (q ends it; ONCE=1 shows it once)
	@$(RUN) scripts/watch.py $(if $(filter 1,$(ONCE)),--once)

download: ## get the checkpoint that VARIANT is a copy of from the model hub
	@$(RUN) scripts/download.py --variant $(VARIANT)

recipe: ## run VARIANT's recipe.yaml into weights/VARIANT
	@$(RUN) scripts/run_recipe.py run --variant $(VARIANT)

recipe-status: ## say for every stage of VARIANT why it would run or be reused
	@$(RUN) scripts/run_recipe.py status --variant $(VARIANT)

calibrate: ## run VARIANT's recipe up to its AWQ calibration
	@$(RUN) scripts/llmcompressor_calibrate.py --variant $(VARIANT)

redistill: ## run VARIANT's recipe and record how its MTP head learned, into results/
	@$(RUN) scripts/redistill_mtp.py --variant $(VARIANT)

prune-vocab: ## run VARIANT's recipe up to its vocabulary pruning
	@$(RUN) scripts/prune_vocab.py --variant $(VARIANT)

bake-cache: ## run VARIANT's recipe up to the packing of its compile cache
	@$(RUN) scripts/bake_cache.py --variant $(VARIANT)

verify: ## re-hash VARIANT's checkpoint, check its tensors against its config, have vLLM load it
	@$(RUN) scripts/run_recipe.py verify --variant $(VARIANT)

clean-store: ## drop recipe outputs that no variant uses
	@$(RUN) scripts/run_recipe.py clean

datasets: ## fetch what SUITE=core is asked from into data/ (HF_TOKEN for the gated GPQA)
	@$(RUN) scripts/fetch_datasets.py --suite $(or $(SUITE),core)

eval-quality: ## score VARIANT on the items that decide at the margins (SUITE=core LIMIT=150)
	@$(RUN) scripts/eval_quality.py --variant $(VARIANT) $(if $(SUITE),--suite $(SUITE)) $(if $(LIMIT),--limit $(LIMIT))

eval-quality-full: ## score VARIANT on every item (SUITE=core)
	@$(RUN) scripts/eval_quality.py --variant $(VARIANT) $(if $(SUITE),--suite $(SUITE)) --full

eval-smoke: ## five items a task: certifies nothing (SUITE=core)
	@$(RUN) scripts/eval_smoke.py --variant $(VARIANT) $(if $(SUITE),--suite $(SUITE)) $(if $(PORT),--port $(PORT))

eval-chat: ## score VARIANT through /v1/chat/completions (SUITE=core THINKING=on|off LIMIT=150)
	@$(RUN) scripts/eval_quality.py --variant $(VARIANT) --chat $(if $(SUITE),--suite $(SUITE)) \
		$(if $(THINKING),--thinking $(THINKING)) $(if $(LIMIT),--limit $(LIMIT))

eval-fidelity: ## compare VARIANT's next-token distributions with its baseline's (STAGES=1: after each stage too)
	@$(RUN) scripts/eval_fidelity.py --variant $(VARIANT) $(if $(filter 1,$(STAGES)),--stages)

check-engine: ## hold VARIANT's tokens in every combination of engine modes against the plain engine's
	@$(RUN) scripts/check_engine.py --variant $(VARIANT)

test-gates: ## do the gates catch damage of VARIANT, and how often do they cry wolf? into results/ (SEEDS=20 AGAIN=tiny-seq8: another variant of the same weights)
	@$(RUN) scripts/gate_power.py --variant $(VARIANT) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(AGAIN),--again $(AGAIN))

try-gate: ## does the whole gate pass a copy of VARIANT and fail damaged ones? into results/ (two hours)
	@$(RUN) scripts/gate_trial.py --variant $(VARIANT)

gate: ## is VARIANT as good as its baseline? fidelity, acceptance, quality, engine modes: one verdict
	@$(RUN) scripts/gate.py --variant $(VARIANT)

eval-latency: ## time VARIANT over WORKLOAD=classes|context|arrivals|poisson|concurrency|shapes|prefix_cache (BASELINE=1 in turns)
	@$(RUN) scripts/eval_latency.py --variant $(VARIANT) $(if $(WORKLOAD),--workload $(WORKLOAD)) \
		$(if $(filter 1,$(BASELINE)),--baseline) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(PORT),--port $(PORT))

build: ## VARIANT as a container image (BASE_IMAGE=name@sha256:…|debootstrap PLATFORM=cpu|cuda CONTAINER_TOOL=… TAG=… WHEELHOUSE=dir)
	@$(RUN) scripts/build_image.py --variant $(VARIANT) $(IMAGE) $(if $(BASE_IMAGE),--base-image $(BASE_IMAGE)) \
		$(if $(WHEELHOUSE),--wheelhouse $(WHEELHOUSE))

build-import: ## as build, with the compile cache of another host (CACHE=compile_cache.tar.gz, its manifests beside it)
	@$(RUN) scripts/build_image.py --variant $(VARIANT) --cache $(CACHE) $(IMAGE) $(if $(BASE_IMAGE),--base-image $(BASE_IMAGE)) \
		$(if $(WHEELHOUSE),--wheelhouse $(WHEELHOUSE))

verify-image: ## look into VARIANT's image without a GPU; one for a CPU is started and asked (RECORD=1: into results/)
	@$(RUN) scripts/verify_image.py --variant $(VARIANT) $(IMAGE) $(if $(filter 1,$(RECORD)),--record)

check-records: ## check every record, and what the READMEs say of them
	@$(RUN) scripts/check_records.py

report: ## the leaderboard, fronts and a page a variant from all records, into report/ (FIGURES=docs/figures: SVGs for a README)
	@$(RUN) scripts/report.py $(if $(FIGURES),--figures $(FIGURES))

new-variant: ## create experiments/NAME from BASE (HYPOTHESIS="…" STAGES="calibrate prune_vocab" for a recipe of its own)
	@$(RUN) scripts/new_variant.py --name '$(NAME)' --base '$(BASE)' --hypothesis '$(subst ','\'',$(value HYPOTHESIS))' $(if $(STAGES),--stages $(STAGES))

promote: ## status and model card for VARIANT, if its gate passed on its present checkpoint
	@$(RUN) scripts/promote.py --variant $(VARIANT)

log: ## the dated log of results, negative ones included (VARIANT=tiny-awq LAST=20, 0 for all)
	@$(RUN) scripts/show_log.py $(if $(filter command line environment,$(origin VARIANT)),--variant $(VARIANT)) $(if $(LAST),--last $(LAST))

replay: ## measure again what made RECORD, and say whether it comes out the same
	@$(RUN) scripts/replay.py $(RECORD)

export-mlflow: ## send the records to an MLflow store (URI=http://…; default the SQLite file mlruns/mlflow.db)
	@$(RUN) scripts/export_mlflow.py $(if $(URI),--uri '$(URI)')

compare: ## print the paired table of two variants (A=tiny B=tiny-awq)
	@$(RUN) scripts/compare.py $(A) $(B)

tables: ## rewrite the generated tables of the READMEs from their records
	@$(RUN) scripts/readme_tables.py

analyze-vocab: ## coverage of VARIANT's vocabulary at several sizes, into results/
	@$(RUN) scripts/analyze_vocab.py --variant $(VARIANT) --sizes $(or $(SIZES),2048 3072 4096 6144)

sweep-k: ## acceptance of VARIANT's drafts for K=0..7 by class and temperature, and the depth to serve (DEPTHS="0 4")
	@$(RUN) scripts/sweep_k.py --variant $(VARIANT) $(if $(DEPTHS),--depths $(DEPTHS))

analyze-lm-head: ## spectrum of VARIANT's output head, low-rank and 4-bit heads, into results/ (TEXT=file)
	@$(RUN) scripts/analyze_lm_head.py --variant $(VARIANT) $(if $(TEXT),--text $(TEXT))

calibration-corpus: ## mix a calibration text in VARIANT's tokens and chats (SOURCES="tinyworld a=f.jsonl:2" TOKENS=200000 OUTPUT=f.jsonl)
	@$(RUN) scripts/build_calibration_corpus.py --variant $(VARIANT) $(foreach s,$(SOURCES),--source $(s)) \
		--tokens $(TOKENS) --output $(OUTPUT)

bench-middleware: ## time VARIANT's server in turns with bare vLLM, into results/ (ROUNDS=6 PAIRS=50)
	@$(RUN) scripts/bench_middleware.py --variant $(VARIANT) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(PAIRS),--pairs $(PAIRS))

bench-first-request: ## time VARIANT's first requests against its next, warmed up and bare, into results/ (ROUNDS=6)
	@$(RUN) scripts/bench_first_request.py --variant $(VARIANT) $(if $(ROUNDS),--rounds $(ROUNDS))

soak: ## load VARIANT's server for MINUTES (15): does its memory stay flat, does every request end? into results/
	@$(RUN) scripts/soak.py --variant $(VARIANT) $(if $(MINUTES),--minutes $(MINUTES))

eval-startup: ## where the seconds of VARIANT's start go, cold, warm and baked, into results/ (ROUNDS=6)
	@$(RUN) scripts/eval_startup.py --variant $(VARIANT) $(if $(ROUNDS),--rounds $(ROUNDS))

profile: ## where a request's time goes on VARIANT: phases, parts of a step, operators, into results/, traces into logs/
	@$(RUN) scripts/profile_requests.py --variant $(VARIANT)

roofline: ## the fastest that VARIANT could be on a GPU (GPU=a10g WITH="tiny-awq" ACCEPTANCE=4.5), into results/
	@$(RUN) scripts/roofline.py --variant $(VARIANT) $(if $(GPU),--gpu $(GPU)) $(if $(WITH),--with $(WITH)) \
		$(if $(ACCEPTANCE),--acceptance-length $(ACCEPTANCE))

bench-prune-vocab: ## time pruning a 4B-shaped checkpoint against copying it (asks for 18 GB of disk first; YES=1)
	@$(RUN) scripts/bench_prune_vocab.py $(if $(filter 1,$(YES)),--yes)

tiny: ## train the embedded model anew (about 30 minutes)
	@$(RUN) scripts/train_tiny.py

tiny-tasks: ## only write the embedded model's test items to eval/tasks/tinyworld
	@$(RUN) scripts/train_tiny.py --tasks-only

lint: ## ruff (lint and format) and mypy
	@.venv/bin/ruff check
	@.venv/bin/ruff format --check
	@.venv/bin/mypy

test: install ## every test that takes minutes at most
	@$(RUN) -m pytest

test-serving: install ## policy and failures of serving with the weights of VARIANT, its recipe run (default here: tiny-best)
	@SLIMQWEN_TEST_VARIANT=$(or $(filter-out tiny,$(VARIANT)),tiny-best) $(RUN) -m pytest \
		tests/serving/test_served_policy.py tests/serving/test_failures.py

test-image: install ## build a CPU image with the tool that is here, look into it, start it, break it (root; 40 minutes, 25 GB)
	@$(RUN) -m pytest -m image

test-soak: install ## the tests that take a quarter of an hour or more
	@$(RUN) -m pytest -m soak

PROGRAMS := variants serve watch download recipe recipe-status calibrate prune-vocab redistill bake-cache verify clean-store datasets \
	eval-quality eval-quality-full eval-smoke eval-chat eval-fidelity gate try-gate check-engine test-gates eval-latency compare \
	tables sweep-k analyze-vocab analyze-lm-head calibration-corpus bench-prune-vocab eval-startup profile roofline tiny \
	tiny-tasks lint bench-middleware bench-first-request soak check-records report new-variant promote log replay export-mlflow build build-import verify-image
$(PROGRAMS): | $(INSTALLED)

.PHONY: help install demo test test-serving test-soak test-image $(PROGRAMS)
