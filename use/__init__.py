"""What a trained model is for: text from it, scores of other texts, and a form that other programs load.

- `model.py`   a saved model, built by `train_gpt.GPT`
- `cache.py`   the same model with a key-value cache, which reads a text token by token
- `sample.py`  text from a prompt
- `score.py`   nats a token and bits a byte of any text, and multiple-choice questions
- `export.py`  a folder for the library transformers, with `modeling_speedrun.py`
"""
