"""Sparse training in the Hugging Face Trainer: a GPT-2 learns to continue sequences that repeat four tokens."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import equipoise as eq
from equipoise.integrations.transformers import SparseTrainer

torch.manual_seed(0)
tokens = torch.randint(32, (600, 4)).repeat(1, 4)  # 16 tokens each
rows = [{"input_ids": row, "labels": row} for row in tokens]

size = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 16}
model = GPT2LMHeadModel(GPT2Config(vocab_size=32, bos_token_id=0, eos_token_id=0, **size))
args = TrainingArguments(
    "runs/gpt2", num_train_epochs=8, per_device_train_batch_size=50, learning_rate=0.01, lr_scheduler_type="constant",
    logging_steps=20, save_steps=40, report_to="none", disable_tqdm=True, use_cpu=True,
)  # fmt: skip
trainer = SparseTrainer(model, args, train_dataset=rows[:500], topology=eq.RigL(sparsity=0.8, every=20))
trainer.train()  # after an interruption: trainer.train(resume_from_checkpoint=True)

model.eval()
with torch.no_grad():
    guess = model(tokens[500:]).logits[:, 4:-1].argmax(-1)  # from the fifth token on the next one is known
accuracy = (guess == tokens[500:, 5:]).float().mean().item()
topology = trainer.sparse_training.topology
print(topology)
print(f"{accuracy:.1%} of the tokens of new sequences are continued correctly")
