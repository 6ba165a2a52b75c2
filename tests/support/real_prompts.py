"""Short questions for a chat model, three of each of eight kinds, and a conversation."""

_FUNCTION = """def total(prices):
    result = 0
    for price in prices:
        result = result + price
    return result"""
_REPORT = (
    "The harbour of Lindau was closed on Monday after a storm. Two ferries were damaged, nobody was hurt. The operator "
    "expects the first ferry to sail again on Thursday, the second a week later. Tickets remain valid for a month."
)
_MINUTES = (
    "Ana reported that the new press runs at half speed because a belt is worn. Ben will order a belt today. Until it "
    "arrives, orders of more than 500 copies go to the old press. The next meeting is on Friday at nine."
)
_LETTER = "Dear Mr Klein, we recieved you're order on monday and will sent it tomorow. Kind regards, Eva Lund"

QUESTIONS = {
    "code": [
        "Write a Python function that returns the largest of three numbers.",
        "Write a Python class Stack with push, pop and is_empty.",
        "Write a shell command that counts the lines of all .txt files in a folder.",
    ],
    "explanation": [
        "Why is the sky blue?",
        "Explain what a hash table is to a child.",
        "How does a bicycle stay upright?",
    ],
    "summary": [
        f"Summarise in one sentence: {_REPORT}",
        f"List the three main points: {_MINUTES}",
        f"Which dates are in this text? {_REPORT}",
    ],
    "edit": [
        f"Rename the variable result to sum_so_far, and print the whole function:\n{_FUNCTION}",
        f"Add a docstring to this function and print it:\n{_FUNCTION}",
        f"Correct the spelling: {_LETTER}",
    ],
    "json": [
        "Give a JSON object with the keys name, age and city for Maria, who is 31 and lives in Porto.",
        'Turn this into a JSON list of objects: "apple, 3; pear, 5; plum, 12".',
        "Write a JSON object that describes a book with title, author, year and a list of two tags.",
    ],
    "translation": [
        "Translate into French: The train leaves at seven in the morning.",
        "Translate into German: Where can I buy a ticket for the museum?",
        "Translate into Spanish: My sister has two cats and a dog.",
    ],
    "maths": [
        "What is 17 times 6? Show the steps.",
        "A shirt costs 40 euros and is reduced by 15 percent. What does it cost now?",
        "Solve for x: 3x + 5 = 20.",
    ],
    "chat": [
        "Hello! What can you do for me?",
        "I am bored. What could I do on a rainy afternoon?",
        "Tell me a joke about a cat and a piano.",
    ],
}
CONVERSATION = [
    "Name three fruits.",
    "Which of them is the sweetest?",
    "Repeat your first answer.",
    "Now in alphabetical order.",
    "Thank you!",
]
