"""What a sweep captures is what each document gives alone."""

import pytest
import torch
import transformers

import statetap
import tiny
from statetap import ArgumentError, CaptureError
from sweeping import near, plain_states, texts

EVERY = "state_output,states,trajectory,decays,betas,writes,state_norms"


def ids_of(tokenizer, text):
    return tokenizer(text)["input_ids"]


def test_states_are_those_of_each_document_alone(model, tokenizer, corpus, sweep):
    lines = texts(40)
    run = sweep(corpus(lines))
    assert len(run) == 40 and run.layers == [0, 1] and run.finished
    for n, text in enumerate(lines):
        row = run.row(n)
        assert (row.text, row.line, row.tokens.tolist()) == (text, n + 1, ids_of(tokenizer, text))
        for layer, state in plain_states(model, ids_of(tokenizer, text)).items():
            near(row["linear_attn.state_output", layer], state)
            assert torch.equal(run["linear_attn.state_output", layer][n], row["state_output", layer])


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_next"])
def test_other_families(checkpoints, tmp_path, corpus, model_type):
    folder, lines = checkpoints(model_type), texts(6)
    run = statetap.capture(folder, corpus(lines), tmp_path / "run", batch_tokens=512, progress=False)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    for n in (0, 5):
        for layer, state in plain_states(plain, run.row(n).tokens.tolist()).items():
            near(run.row(n)["state_output", layer], state)


def test_every_value_of_every_token(model, tokenizer, corpus, sweep):
    lines = texts(12, seed=1)
    run = sweep(corpus(lines), values=EVERY, tokens="all")
    for n, text in enumerate(lines):
        row, ids = run.row(n), ids_of(tokenizer, text)
        for layer in run.layers:
            t = row.trajectory(layer)
            states = t.states()[0]
            assert states.shape[0] == len(row) == len(ids)
            for token in {0, len(ids) // 2, len(ids) - 1}:
                near(states[token], plain_states(model, ids[: token + 1])[layer])
            near(row["states", layer], states, 1e-5)
            assert torch.equal(row["states", layer][-1], row["state_output", layer])
            assert torch.equal(t.final_state[0], row["state_output", layer])
            torch.testing.assert_close(row["state_norms", layer], states.norm(dim=(-1, -2)), rtol=1e-4, atol=1e-7)
            for value, field in [("writes", t.updates), ("decays", t.decays), ("betas", t.betas)]:
                assert torch.equal(row[value, layer], field[0])
            assert (row["decays", layer] <= 0).all() and (row["betas", layer] > 0).all()


def test_batching_does_not_matter(corpus, sweep):
    lines = texts(30, seed=2)
    runs = [
        sweep(corpus(lines), f"run{tokens}", batch_tokens=tokens, values=EVERY, tokens="every:16")
        for tokens in (1, 4096)
    ]
    for value in runs[0].values:
        for layer in runs[0].layers:
            alone, together = (run[value, layer] for run in runs)
            assert alone.shape == together.shape
            torch.testing.assert_close(alone[:], together[:], rtol=1e-4, atol=1e-5)


def test_chosen_tokens_layers_and_heads(corpus, sweep):
    data = corpus(["x" * 70, "y" * 3, "z" * 40])
    whole = sweep(data, "whole", values=EVERY, tokens="all")
    run = sweep(data, values=EVERY, tokens="every:32,-1", layers="1", heads="3,0-1")
    assert [row.positions for row in run.rows()] == [[31, 63, 69], [2], [31, 39]]
    assert run.layers == [1]
    with pytest.raises(ArgumentError, match="layer: 0 was not captured; there is 1"):
        run["linear_attn.states", 0]
    heads, key_heads = [0, 1, 3], [0, 0, 1]
    for n in range(3):
        mine, all_of_it = run.row(n), whole.row(n)
        positions = torch.tensor(mine.positions)
        assert torch.equal(mine["states", 1], all_of_it["states", 1][positions][:, heads])
        assert torch.equal(mine["state_output", 1], all_of_it["state_output", 1][heads])
        for value in ("decays", "betas", "writes", "trajectory.updates", "trajectory.chunk_states"):
            assert torch.equal(mine[value, 1], all_of_it[value, 1][:, heads])
        torch.testing.assert_close(mine["state_norms", 1], all_of_it["state_norms", 1][:, heads])
        assert torch.equal(mine["trajectory.keys", 1], all_of_it["trajectory.keys", 1][:, key_heads])
        near(mine.trajectory(1).states()[0], all_of_it["states", 1][:, heads], 1e-5)


def test_a_layer_without_a_recurrent_mixer_is_refused(corpus, sweep, tmp_path):
    for layers in ("0-2", "-1", [2]):
        with pytest.raises(ArgumentError, match=r"no recurrent mixer in 2; the layers that have one are 0-1$"):
            sweep(corpus(["a"]), layers=layers)
    with pytest.raises(ArgumentError, match="layers: layer 3 does not exist; there are 3"):
        sweep(corpus(["a"]), layers="3")
    with pytest.raises(ArgumentError, match="heads: head 4 does not exist; there are 4"):
        sweep(corpus(["a"]), heads="4")
    assert not (tmp_path / "run").exists()


def test_storage_dtypes(corpus, sweep):
    data = corpus(texts(10))
    exact = sweep(data, "exact", values="states,trajectory", tokens="every:8")
    for dtype, relative in [("bfloat16", 2**-8), ("float16", 2**-11)]:
        run = sweep(data, dtype, values="states,trajectory", tokens="every:8", dtype=dtype)
        for value in run.values:
            stored, true = run[value, 0][:], exact[value, 0][:]
            kept = value.endswith(("decays", "betas"))
            assert stored.dtype == (torch.float32 if kept else getattr(torch, dtype))
            assert (stored.float() - true).abs().le(relative * true.abs() + 2**-24).all() and (
                not kept or stored.equal(true)
            )
        largest = exact["states", 0][:].abs().max()
        for row, other in zip(run.rows(), exact.rows()):
            error = row.trajectory(0).states()[0].float() - other.trajectory(0).states()[0]
            assert error.abs().max() <= 8 * relative * largest


def loud(checkpoint, factor=3e6):
    """The model with values so large that states are."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    mixer = model.model.layers[1].linear_attn
    channels = mixer.conv_dim - mixer.value_dim
    with torch.no_grad():  # of head 2 alone
        head = slice(channels + 2 * mixer.head_v_dim, channels + 3 * mixer.head_v_dim)
        mixer.conv1d.weight[head] *= factor
    return model


def test_float16_counts_what_overflows_by_layer_and_head(checkpoint, tokenizer, corpus, tmp_path):
    model, data = loud(checkpoint), corpus(texts(9, seed=3))
    options = {"tokenizer": tokenizer, "progress": False, "batch_tokens": 512, "values": "state_output,states"}
    exact = statetap.capture(model, data, tmp_path / "exact", **options)
    run = statetap.capture(model, data, tmp_path / "half", dtype="float16", **options)
    true = exact["state_output", 1][:]
    assert true.abs().max() > 1e5
    expected = true.to(torch.float16).isinf().sum((0, 2, 3)).tolist()
    assert expected[2] > 0 and expected[0] == expected[1] == expected[3] == 0
    for value in ("state_output", "states"):
        counted = [x for x in run.overflow if x["value"] == value]
        assert counted == [{"layer": 1, "value": value, "head": 2, "count": expected[2]}]
    assert '"event": "overflow", "layer": 1' in (tmp_path / "half" / "events.jsonl").read_text()
    assert exact.overflow == []


def test_texts_and_duplicates_and_a_tokenizer_without_pad_and_bos(corpus, sweep, tokenizer):
    lines = ["a", "same", "same", "nul \0", "👩‍👩‍👧", "e\u0301", "שלום", "line\u2028", " kept "]
    assert tokenizer.pad_token is None and tokenizer.bos_token is None
    run = sweep(corpus(lines))
    assert [row.text for row in run.rows()] == lines
    assert [row.document for row in run.rows()] == list(range(9))
    assert torch.equal(run["state_output", 0][1], run["state_output", 0][2])


def test_bos_is_added_as_the_tokenizer_does(corpus, sweep, model, tmp_path):
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", tiny.END)]
    )
    data = corpus(["abc"])
    options = {"tokenizer": tokenizer, "progress": False}
    with_bos = statetap.capture(model, data, tmp_path / "with", **options)
    without = statetap.capture(model, data, tmp_path / "without", special_tokens=False, **options)
    assert with_bos.row(0).tokens.tolist() == [tiny.END, *without.row(0).tokens.tolist()]
    assert without.manifest["identity"]["special_tokens"] is False
    near(with_bos.row(0)["state_output", 0], plain_states(model, with_bos.row(0).tokens.tolist())[0])


def test_hostile_lines_are_skipped_with_their_numbers(tmp_path, sweep, model):
    path = tmp_path / "hostile.jsonl"
    lines = ['{"text": "a"}', "", '{"text": "   "}', "not json", '{"body": "x"}', '{"text": 3}']
    lines += ['{"text": "%s"}' % ("x" * 5000), '{"text": "b"}']
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(CaptureError, match=r"hostile\.jsonl, line 2: empty"):
        sweep(path)
    run = sweep(path, on_error="skip")
    assert [row.line for row in run.rows()] == [1, 8]
    assert [line for line, _ in run.skipped] == [2, 3, 4, 5, 6, 7]
    assert dict(run.skipped)[7].startswith("5000 tokens, and the model takes 2048")
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert '{"event": "skipped", "line": 5, "reason": "no field \'text\' (it has \'body\')"}' in events


def test_a_long_text_split_and_truncated(corpus, sweep, model):
    data = corpus(["s", "0123456789" * 500])
    with pytest.raises(CaptureError, match="line 2: 5000 tokens, and the model takes 2048"):
        sweep(data)
    run = sweep(data, "split", long="split")
    assert [(r.line, r.first_token, len(r)) for r in run.rows()] == [
        (1, 0, 1),
        (2, 0, 2048),
        (2, 2048, 2048),
        (2, 4096, 904),
    ]
    assert run.row(3).text == "0123456789" * 500
    near(run.row(3)["state_output", 0], plain_states(model, run.row(3).tokens.tolist())[0])
    run = sweep(data, "truncate", long="truncate")
    assert [(r.line, len(r)) for r in run.rows()] == [(1, 1), (2, 2048)]
    assert '{"event": "long", "line": 2, "tokens": 5000}' in (run.path / "events.jsonl").read_text()


def test_files_hold_no_more_bytes_than_their_values(corpus, sweep):
    lines = texts(24)
    run = sweep(corpus(lines), values="states,trajectory", tokens="last", dtype="bfloat16", batch_tokens=4096)
    tokens = sum(map(len, lines))
    chunks = sum(-(-len(t) // 64) for t in lines)
    state = 2 * 4 * 16 * 24
    layer = 24 * state + chunks * state + 24 * state + tokens * (2 * 2 * 16 + 2 * 4 * 24 + 4 * 4 + 4 * 4)
    assert sum(p.stat().st_size for p in (run.path / "shards").iterdir()) - 2 * layer < 4096


def test_a_model_that_was_given_is_left_as_it_was(checkpoint, tokenizer, corpus, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).train()
    kernels = transformers.models.qwen3_5.modeling_qwen3_5
    before = {name: getattr(kernels, name) for name in dir(kernels) if "gated_delta_rule" in name}
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    statetap.capture(model, corpus(["abc"]), tmp_path / "run", tokenizer=tokenizer, progress=False)
    assert model.training
    assert {name: getattr(kernels, name) for name in before} == before
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks


def test_a_dry_run_says_what_a_run_then_holds(corpus, sweep, tmp_path):
    data = corpus(texts(25))
    options = {"values": "state_output,states,betas", "tokens": "every:16", "dtype": "bfloat16"}
    plan = sweep(data, dry_run=True, **options)
    assert not (tmp_path / "run").exists()
    run = sweep(data, **options)
    assert (plan.documents, plan.tokens, plan.layers) == (len(run), run.tokens, (0, 1))
    held = {v: sum(run[v, n][:].nbytes for n in run.layers) for v in ("state_output", "states", "betas")}
    assert plan.bytes_by_value == held and plan.bytes == sum(held.values())
    assert plan.rows_by_value == {v: len(run[v, 0]) for v in held}
    assert plan.free_bytes > 0 and plan.seconds > 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"values": "state"}, "values: got 'state', needs names from state_output, states, "),
        ({"values": ""}, "values: got none"),
        ({"values": "betas,linear_attn.betas"}, "values: got betas,betas, which has one twice"),
        ({"tokens": "every:8"}, "tokens: every:8 chooses where `states` are taken, and values (state_output) has no"),
        ({"tokens": "all", "values": "trajectory"}, "tokens: all chooses where"),
        ({"heads": "1,1"}, "heads: '1,1' has 1 twice"),
        ({"layers": "0-1,1"}, "layers: '0-1,1' has 1 twice"),
        ({"dtype": "float64"}, "dtype: got 'float64', needs one of float32, bfloat16, float16"),
        ({"batch_tokens": 0}, "batch_tokens: got 0, needs a whole number of at least 1"),
        ({"limit": True}, "limit: got True"),
        ({"on_error": "ignore"}, "on_error: got 'ignore'"),
        ({"long": "cut"}, "long: got 'cut'"),
        ({"tokens": "every:0"}, "tokens: got 'every:0'"),
        ({"layers": "a"}, "layers: got 'a'"),
        ({"backend": "fast"}, "backend: 'fast' is not one of"),
        ({"data_format": "csv"}, "data_format: got 'csv'"),
    ],
)
def test_bad_options_name_the_option(corpus, sweep, tmp_path, options, message):
    with pytest.raises(ArgumentError) as error:
        sweep(corpus(["a"]), **options)
    assert message in str(error.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"backend": "fast"}, "backend: 'fast' is not one of"),
        ({"backend": "triton"}, "backend: 'triton' cannot run on cpu: "),
        ({"device": "tpu9"}, "device: 'tpu9' cannot be used"),
        ({"device": "cuda:99"}, "device: 'cuda:99' cannot be used"),
        ({"model_dtype": "int3"}, "model_dtype: got 'int3'"),
    ],
)
def test_what_the_model_cannot_be_run_with_is_said_before_it_is_loaded(corpus, checkpoint, tmp_path, options, message):
    data, before = corpus(["a"]), transformers.AutoModelForCausalLM.from_pretrained
    try:
        transformers.AutoModelForCausalLM.from_pretrained = None  # what is called fails otherwise
        with pytest.raises(statetap.Error) as error:
            statetap.capture(checkpoint, data, tmp_path / "run", progress=False, **options)
    finally:
        transformers.AutoModelForCausalLM.from_pretrained = before
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_model_that_cannot_be_loaded(corpus, tmp_path):
    for folder in ("none", "."):
        with pytest.raises(CaptureError, match=r"^model: .* cannot be loaded: "):
            statetap.capture(tmp_path / folder, corpus(["a"]), tmp_path / "run", progress=False)
    with pytest.raises(ArgumentError, match="tokenizer: "):
        statetap.capture(torch.nn.Linear(1, 1), corpus(["a"]), tmp_path / "run", progress=False)
