"""The bundled model's tokenizer: byte-level BPE with a chat template."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 4096
BOS, EOS, USER, ASSISTANT = "<s>", "</s>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}{{ eos_token }}"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(texts: list[str], max_positions: int) -> PreTrainedTokenizerFast:
    """A tokenizer trained on `texts`; ids 0 to 3 are BOS, EOS, USER and ASSISTANT."""
    core = Tokenizer(models.BPE())
    # Digits are split one by one: numbers are copied digit by digit instead of guessed as rare whole tokens.
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    specials = [AddedToken(t, special=True, normalized=False) for t in (BOS, EOS, USER, ASSISTANT)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=specials, initial_alphabet=alphabet)
    )
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=max_positions,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
