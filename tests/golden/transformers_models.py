#!/usr/bin/env python3
"""Small GPTs as transformers save them, with the logits that transformers compute: hf_*/ beside this script.

    python3 tests/golden/transformers_models.py        transformers 5.24, torch 2.15

Each folder has config.json, model.safetensors (f32, random weights) and logits.txt, whose lines are as in mlp.py: "ids", a batch
of 2, and their "logits". Weights are larger than those of a beginning, so that attention is far from uniform.

hf_gpt2           GPT-2's form: 2 layers, 3 heads, width 18, mlp of 40, vocabulary 23, positions 9; head tied
hf_llama          Llama's form: 2 layers, 4 heads on 2 of keys and values, width 24, mlp of 20, vocabulary 29; a head of its own;
                  rope of the kind llama3, of whose 3 wavelengths one is kept, one is between, one is stretched
hf_llama_tied     the same with the head tied, 3 heads on 1 of width 6, plain rope
"""
import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))


def llama(**changes):
    sizes = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=24, intermediate_size=20, vocab_size=29,
                 max_position_embeddings=16384, rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=1)
    return LlamaForCausalLM(LlamaConfig(**(sizes | changes)))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=3, n_embd=18, n_inner=40, n_positions=9, vocab_size=23, bos_token_id=0,
                                      eos_token_id=1))


def save(name, model, seed):
    torch.manual_seed(seed)
    model = model.eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            scale, around = (0.2, 1.0) if p.dim() == 1 and key.endswith("weight") else (0.4, 0.0)
            p.copy_(around + scale * torch.randn(p.shape))
    folder = os.path.join(HERE, name)
    model.save_pretrained(folder)
    os.remove(os.path.join(folder, "generation_config.json"))
    ids = torch.randint(0, model.config.vocab_size, (2, 8))
    with torch.no_grad():
        logits = model(ids).logits
    with open(os.path.join(folder, "logits.txt"), "w") as f:
        f.write("ids 2,8 " + " ".join(str(i) for i in ids.flatten().tolist()) + "\n")
        f.write(f"logits 2,8,{model.config.vocab_size} " + " ".join(f"{x:.9g}" for x in logits.flatten().tolist()) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    save("hf_gpt2", gpt2(), seed=1)
    stretch = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    save("hf_llama", llama(rope_theta=3.4e8, rope_scaling=stretch), seed=2)
    save("hf_llama_tied", llama(num_attention_heads=3, num_key_value_heads=1, hidden_size=18, tie_word_embeddings=True), seed=3)
