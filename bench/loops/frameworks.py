"""Training loops of frameworks above PyTorch: `frameworks.py NAME STEPS`, as plain.py has them."""

import os
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
import plain

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
LENGTH, WORDS = 32, 200


class Tokens(Dataset):
    """Random tokens, for a language model or a classifier."""

    def __init__(self, count, *, labels):
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, WORDS, (count, LENGTH), generator=generator)
        self.labels = labels

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        label = torch.tensor(index % 2) if self.labels else tokens
        return {"input_ids": tokens, "attention_mask": torch.ones(LENGTH).long(), "labels": label}


def _trainer(model, dataset, steps, **options):
    from transformers import Trainer, TrainingArguments

    folder = tempfile.mkdtemp(dir=os.environ["LOOP_OUT"])
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=False,
        seed=0,
        **options,
    )
    held_out = torch.utils.data.Subset(dataset, range(32))
    trainer = Trainer(model=model, args=arguments, train_dataset=dataset, eval_dataset=held_out)
    trainer.train()
    return [model], steps


def trainer_bert(steps):
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=LENGTH,
    )
    model = BertForSequenceClassification(config)
    options = {"eval_strategy": "steps", "eval_steps": 20}
    return _trainer(model, Tokens(512, labels=True), steps, **options)


def trainer_gpt2(steps):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=128, n_layer=2, n_head=4, use_cache=False
    )
    model = GPT2LMHeadModel(config)
    options = {"gradient_accumulation_steps": 2}
    return _trainer(model, Tokens(512, labels=False), steps, **options)


def accelerate(steps, accumulate=2):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model = plain.Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    inputs = torch.randn(2 * steps * accumulate * plain.BATCH, plain.WIDTH)
    labels = torch.arange(len(inputs)) % plain.CLASSES
    batches = DataLoader(TensorDataset(inputs, labels), batch_size=plain.BATCH, shuffle=True)
    model, optimizer, batches, schedule = accelerator.prepare(model, optimizer, batches, schedule)
    for x, y in batches:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return [model], steps


def lightning(steps):
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = plain.Net()

        def training_step(self, batch, _):
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss, prog_bar=True)
            return loss

        def validation_step(self, batch, _):
            x, y = batch
            self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    ranks = int(os.environ["WORLD_SIZE"])
    inputs = torch.randn(ranks * steps * plain.BATCH, plain.WIDTH)
    dataset = TensorDataset(inputs, torch.arange(len(inputs)) % plain.CLASSES)
    held_out = torch.utils.data.Subset(dataset, range(ranks * 2 * plain.BATCH))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy="ddp",
        max_steps=steps,
        val_check_interval=10,
        logger=False,
        enable_checkpointing=False,
        default_root_dir=os.environ["LOOP_OUT"],
    )
    module = Module()
    trainer.fit(
        module,
        DataLoader(dataset, batch_size=plain.BATCH),
        DataLoader(held_out, batch_size=plain.BATCH),
    )
    return [module], steps


LOOPS = {
    function.__name__: function for function in (trainer_bert, trainer_gpt2, accelerate, lightning)
}


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    models, steps = LOOPS[sys.argv[1]](int(sys.argv[2]))
    plain.write_result(sys.argv[1], models, steps)


if __name__ == "__main__":
    main()
