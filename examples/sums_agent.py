"""An agent with a tool, a sub-agent and a condensed context. It imports nothing of rrl: any OpenAI client works."""

import ast
import asyncio
import json
import operator

import openai

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Calculates a sum or a difference.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
CALL = '<tool_call>\n{{"name": "calculate", "arguments": {{"expression": "{}"}}}}\n</tool_call>'
SYSTEM = f"You answer with the result of a tool. Write the call of the tool exactly like this:\n{CALL.format('6 + 2')}"
EXAMPLES = ("6 + 2", "9 - 5")
"""Questions that, with their tool calls, become earlier turns of the conversation. A small model copies the form."""
MAX_CALLS = 2
CLIENT = openai.AsyncOpenAI(base_url="http://unset", api_key="unset")  # all episodes share its connections


async def run(item, base_url, api_key):
    """Let one conversation use the tool while another conversation guesses, and answer from both results."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    found, guessed = await asyncio.gather(with_tool(client, item), ask(client, [user(f"{item} Think aloud.")]))
    notes = f"The calculator says {found}. A friend says: {(guessed.content or '')[:100]}"
    await ask(client, [user(f"{notes}\n{item}")])
    return None  # the task scores the last answer


async def with_tool(client, item):
    """Return the result of the tool, or the model's text if the model does not call it."""
    messages = [{"role": "system", "content": SYSTEM}]
    for example in EXAMPLES:
        messages += [user(f"What is {example}?"), {"role": "assistant", "content": CALL.format(example)}]
    messages.append(user(item.partition("?")[0] + "?"))
    result = "nothing"
    for _ in range(MAX_CALLS):
        answer = await ask(client, messages, tools=TOOLS)
        if not answer.tool_calls:
            return result if result != "nothing" else (answer.content or result)[:40]
        messages.append(answer)
        for call in answer.tool_calls:
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return result


async def ask(client, messages, **options):
    """Return the model's message."""
    reply = await client.chat.completions.create(model="policy", messages=messages, **options)
    return reply.choices[0].message


def user(text):
    """Return a message of the user."""
    return {"role": "user", "content": text}


def calculate(arguments):
    """Run the tool: return the value of a sum or difference, or an error text about the arguments."""
    try:
        return str(value(ast.parse(json.loads(arguments)["expression"], mode="eval").body))
    except (ValueError, KeyError, TypeError, SyntaxError, RecursionError):
        return "an error: write two numbers with + or - between them"


def value(node):
    """Return the value of an expression of numbers, + and -. Nothing else is evaluated, because the model wrote it."""
    operators = {ast.Add: operator.add, ast.Sub: operator.sub}
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in operators:
        return operators[type(node.op)](value(node.left), value(node.right))
    raise ValueError("not a sum")
