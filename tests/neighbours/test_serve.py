"""`transformers serve` answers as generate() does, in a process that has imported the family."""

import json
import urllib.request


def test_a_chat_is_what_generate_says(serve, small_model):
    folder, model, tokenizer = small_model("decoder")
    messages = [{"role": "user", "content": "one two three"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    address = serve("import triptych, transformers.cli.transformers as cli; cli.main()", folder)
    body = {"model": str(folder), "messages": messages, "max_tokens": 8, "temperature": 0.0}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.load(response)
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    assert expected and answer["choices"][0]["message"]["content"] == expected
