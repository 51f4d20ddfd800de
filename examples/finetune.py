"""Fine-tune a Hugging Face model: is a line of Python's standard library a comment or code?

`model` is a folder as `save_pretrained` writes it. With weights in it they are the beginning; the
one beside this file, tiny_bert, has a configuration only, so that nothing has to be downloaded.
Needs `pip install '.[examples]'`.
"""

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForSequenceClassification

import elastic

LENGTH, PADDING, SHIFT = 48, 0, 1
"""A token is a byte of the line plus SHIFT."""
MOST_LINES = 4096


class Lines(Dataset):
    """As many lines of comments as of code, without what tells them apart at once."""

    def __init__(self):
        comments, code = [], []
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            for line in map(str.strip, file.read_text(errors="ignore").splitlines()):
                if len(bare := line.lstrip("# ")) >= 8:
                    (comments if line.startswith("#") else code).append(bare)
            if min(len(comments), len(code)) >= MOST_LINES // 2:
                break
        pairs = zip(comments, code, strict=False)
        self.lines = [(line, i % 2) for pair in pairs for i, line in enumerate(pair)][:MOST_LINES]

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, i):
        line, label = self.lines[i]
        tokens = torch.full((LENGTH,), PADDING)
        shown = torch.tensor([byte + SHIFT for byte in line.encode()[:LENGTH]])
        tokens[: len(shown)] = shown
        return {"input_ids": tokens, "attention_mask": tokens != PADDING, "labels": label}


class CommentOrCode(elastic.Workload):
    def __init__(self, model="tiny_bert", lr=1e-3, trains_embeddings=True):
        self.model, self.lr = model, lr
        self.trains_embeddings = trains_embeddings

    def build_model(self):
        folder = Path(self.model)
        if any(folder.glob("*.safetensors")):
            model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
        else:
            config = AutoConfig.from_pretrained(folder, num_labels=2)
            model = AutoModelForSequenceClassification.from_config(config)
        model.get_input_embeddings().requires_grad_(self.trains_embeddings)
        return model

    def build_optimizer(self, params):
        return torch.optim.AdamW(params, lr=self.lr)

    def dataset(self):
        return Lines()

    def loss(self, model, batch):
        return model(**batch).loss
