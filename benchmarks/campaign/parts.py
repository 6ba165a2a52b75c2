"""What the programs of cases are put together from: a script is given the source of the definitions that it needs."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import tokenizers
import torch
import transformers

import token_recycling as tr


def build(seed, attention, repeats, model_type, **config):
    """A random model of a family; `repeats` makes the newest token count for most."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(model_type, **config)
    chosen = {"attn_implementation": attention} if attention else {}
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **chosen).eval()
    model.generation_config.eos_token_id = model.generation_config.bos_token_id = None
    model.generation_config.pad_token_id = 0
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(0.1 * torch.randn_like(weight))
            elif repeats and "embed" not in name and "head" not in name and "wte" not in name:
                weight.mul_(0.4)
    return model


class Int8(torch.nn.Module):
    """A linear layer whose weights are kept in 8 bits."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.register_buffer("scale", linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.register_buffer("rounded", (linear.weight.detach() / self.scale).round().to(torch.int8))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.rounded.float() * self.scale, self.bias)


class Adapter(torch.nn.Module):
    """A linear layer with a low-rank one beside it that can be switched off."""

    def __init__(self, linear):
        super().__init__()
        self.linear, self.on = linear, True
        self.down = torch.nn.Linear(linear.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x)) if self.on else self.linear(x)


def replace_linear(model, made):
    """Puts another module into the place of every linear layer but the output layer."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and child is not model.get_output_embeddings():
                setattr(module, name, made(child).train(model.training))


def int8_weights(model):
    """Keeps the weights of linear layers in 8 bits."""
    replace_linear(model, Int8)


def add_adapters(model):
    """Puts an adapter beside every linear layer."""
    torch.manual_seed(9)
    replace_linear(model, Adapter)


def switch(model):
    """Switches adapters off that are on, and on that are off."""
    for module in model.modules():
        if type(module) is Adapter:
            module.on = not module.on


def related(model):
    """A model that often agrees with another one."""
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.01 * torch.randn_like(weight))
    return model


def medusa_heads(model):
    """A folder with two heads that have learned nothing."""
    from token_recycling.drafters.medusa.heads import MedusaHeads, save_heads
    from token_recycling.model.inspection import output_width

    folder = tempfile.mkdtemp()
    save_heads(Path(folder), MedusaHeads(2, output_width(model)), model, [[0.5, 0.2], [0.3, 0.1]])
    return folder


def eagle_head(model):
    """A folder with a head of version 1 that has learned nothing."""
    from token_recycling.drafters._shared.training.continuations import Continuations
    from token_recycling.drafters.eagle.formats import save_head
    from token_recycling.drafters.eagle.train import new_head
    from token_recycling.drafters.eagle.train_options import EagleTraining

    folder = tempfile.mkdtemp()
    save_head(folder, new_head(model, Continuations([], []), EagleTraining(version=1)), model)
    return folder


def dflash_assistant(model):
    """A DFlash assistant of two layers that has learned nothing, with blocks of 5."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    text = model.config.get_text_config(decoder=True)
    torch.manual_seed(5)
    config = MuseGlimmerAssistantConfig(
        hidden_size=text.hidden_size,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=12,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        block_size=5,
        mask_token_id=0,
        target_layer_ids=[0, text.num_hidden_layers - 1],
        initializer_range=0.3,
    )
    return MuseGlimmerAssistantModel(config).eval()


def words(model):
    """A tokenizer whose tokens are words `t0`, `t1` and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    size = model.get_input_embeddings().weight.shape[0]
    made = Tokenizer(models.WordLevel({f"t{token}": token for token in range(size)}, unk_token="t0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def acceptance_head(model):
    """A head that believes in two tokens of three."""
    from token_recycling.drafters.specdec_pp.head import AcceptanceHead
    from token_recycling.model.inspection import output_width

    torch.manual_seed(5)
    head = AcceptanceHead(output_width(model), depth=1)
    with torch.no_grad():
        head.output.weight.normal_()
        head.output.bias.fill_(1.0)
    return head


def datastore(model):
    """A file of what a model says after some tokens."""
    from token_recycling.drafters.rest.datastore import build

    prompts = torch.arange(1, 13).view(6, 2)
    texts = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=12, do_sample=False)
    file = Path(tempfile.mkdtemp()) / "datastore"
    build(texts.tolist(), file)
    return str(file)


class Garbage(tr.Drafter):
    """Random tokens on random trees, siblings with equal tokens among them."""

    def __init__(self, seed):
        self.draws = torch.Generator().manual_seed(seed)

    def draft(self, context):
        size = int(torch.randint(1, 9, (), generator=self.draws))
        paths = [()]
        for _ in range(size):
            parent = paths[int(torch.randint(len(paths), (), generator=self.draws))]
            paths.append((*parent, sum(path[:-1] == parent for path in paths[1:])))
        tree = tr.Tree.from_paths(sorted(paths[1:], key=lambda path: (len(path), path)))
        tokens = torch.randint(1, 4, (len(tree),), generator=self.draws)
        known = context.tokens[torch.randint(len(context.tokens), (len(tree),), generator=self.draws)]
        tokens = torch.where(tokens > 1, known.cpu(), tokens).to(context.root.device)
        tokens[0] = context.root[0]
        return tr.Draft(tree, tokens)


class Counting:
    """Remembers how often it was called."""

    called = 0

    def criterion(self, ids, scores, **_):
        self.called += 1
        return torch.full((len(ids),), self.called == 7)

    def processor(self, ids, scores):
        self.called += 1
        return scores.roll(self.called % 3, -1)


class Interrupt:
    """Raises in the middle: a criterion, a processor or a streamer."""

    def __init__(self, after, error):
        self.left, self.error = after, error

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            raise self.error("in the middle")

    def end(self):
        pass

    def criterion(self, ids, scores, **_):
        self.put(ids)
        return ids[:, -1] < 0

    def processor(self, ids, scores):
        self.put(ids)
        return scores


class Given:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.tokens.append(-1)


def tokenizer():
    """A tokenizer of single characters."""
    vocabulary = {chr(33 + token): token for token in range(94)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def at_once(jobs):
    """What functions return, each called in a thread of its own."""
    done = {}

    def work(place, job):
        try:
            done[place] = job()
        except Exception as error:
            done[place] = error

    threads = [threading.Thread(target=work, args=one, daemon=True) for one in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        if thread.is_alive():
            raise TimeoutError("a thread hangs")
    for place in range(len(jobs)):
        if isinstance(done[place], Exception):
            raise done[place]
    return [done[place] for place in range(len(jobs))]


def in_turn(jobs):
    """What functions return, called one after another."""
    return [job() for job in jobs]


def parts(output, mask, cache=None):
    """What a call returned and left in a cache, as a list of tensors: token ids first."""
    if isinstance(output, torch.Tensor):
        found = [output]
    else:
        found = [output.sequences, *(output.scores or ()), *(output.logits or ())]
        cache = output.past_key_values
    if cache is None:
        return found
    held = int(cache.get_seq_length())
    found.append(torch.tensor(held))
    for layer in cache.layers:
        if getattr(layer, "keys", None) is None:
            continue
        for states in (layer.keys[:, :, :held].clone(), layer.values[:, :, :held].clone()):
            dropped = max(0, held - states.shape[2])
            for row in range(len(mask)):  # slots of padding may hold anything
                states[row, :, : max(0, int((mask[row] == 0).sum()) - dropped)] = 0
            found.append(states)
    return found


def first_difference(wanted, found):
    """(call, tensor, what differs) of the first difference between lists of lists of tensors, or None."""
    for call, (one, other) in enumerate(zip(wanted, found, strict=False)):
        for place, (theirs, ours) in enumerate(zip(one, other, strict=False)):
            if theirs.ndim == ours.ndim == 4:  # of a window, accelerated calls keep all slots
                ours = ours[:, :, -theirs.shape[2] :]
            if theirs.shape != ours.shape or not theirs.is_floating_point():
                if not torch.equal(theirs, ours):
                    if theirs.is_floating_point():
                        return call, place, f"wanted shape {tuple(theirs.shape)}, found {tuple(ours.shape)}"
                    both, first = (theirs, ours), 0
                    if theirs.ndim == 2 and theirs.shape == ours.shape:
                        first = int((theirs != ours).any(dim=0).nonzero()[0])
                        both = [ids[:, first:] for ids in both]
                    wanted_, found_ = (ids.tolist() for ids in both)
                    return call, place, f"from token {first} wanted {wanted_}, found {found_}"
                continue
            scale = float(theirs[theirs.isfinite()].abs().max()) if theirs.isfinite().any() else 1.0
            if not torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4 * max(1.0, scale), equal_nan=True):
                return call, place, f"numbers differ by {float((ours - theirs).nan_to_num(0).abs().max()):.1e}"
        if len(one) != len(other):
            return call, min(len(one), len(other)), f"wanted {len(one)} tensors, found {len(other)}"
    if len(wanted) != len(found):
        return min(len(wanted), len(found)), 0, f"wanted {len(wanted)} results, found {len(found)}"
    return None


def fixed_costs(target, slope):
    """Says what passes cost, and that drafting costs nothing, instead of learning it, so that trees do not depend on
    the machine: a node more `slope` passes over one token.
    """
    import numpy as np

    from token_recycling.costs.costs import OnlineCurve, Work
    from token_recycling.model import pass_times

    pass_times.prior = lambda target: 1 + slope * np.arange(64)
    OnlineCurve.took = Work.count = lambda *_: None
