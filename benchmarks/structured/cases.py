"""Questions and the forms of their answers: kinds of JSONSchemaBench, calls of API-Bank's kind, patterns."""

from __future__ import annotations

from typing import Any, NamedTuple


class Case(NamedTuple):
    """One question and the form of its answer."""

    name: str
    question: str
    form: dict[str, Any]
    """`json_schema` or `regex`, as `token_recycling.constrain` takes them."""


def _object(**properties: Any) -> dict[str, Any]:
    """A strict object: every property is required, and no other is allowed."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _list(items: dict[str, Any], least: int = 1, most: int = 3) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


_TEXT: dict[str, Any] = {"type": "string"}
_NUMBER, _COUNT, _YES = {"type": "number"}, {"type": "integer", "minimum": 0, "maximum": 9999}, {"type": "boolean"}


def _one_of(*values: str) -> dict[str, Any]:
    return {"enum": [*values]}


_SCHEMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "person": (
        "Extract the person: Maria Lopez, 34, is a nurse from Madrid. She is married and her mail is maria@clinic.es.",
        _object(name=_TEXT, age=_COUNT, occupation=_TEXT, city=_TEXT, married=_YES, email=_TEXT),
    ),
    "weather": (
        "Report the weather as JSON: in Oslo it is 4 degrees, light rain, humidity 81 percent, west wind of 12 km/h.",
        _object(
            city=_TEXT,
            temperature=_NUMBER,
            unit=_one_of("celsius", "fahrenheit"),
            condition=_one_of("sunny", "cloudy", "rain", "snow"),
            humidity=_COUNT,
            wind=_object(speed=_NUMBER, direction=_one_of("north", "east", "south", "west")),
        ),
    ),
    "order": (
        "Write the order as JSON: Tom Baker ordered two lamps at 30 dollars and one desk at 120 dollars, paid by card.",
        _object(
            customer=_TEXT,
            items=_list(_object(product=_TEXT, quantity=_COUNT, price=_NUMBER)),
            total=_NUMBER,
            payment=_one_of("card", "cash", "transfer"),
            shipped=_YES,
        ),
    ),
    "package": (
        "Describe a small JavaScript package for parsing dates as JSON metadata.",
        _object(
            name=_TEXT,
            version={"type": "string", "pattern": r"^[0-9]+\.[0-9]+\.[0-9]+$"},
            description=_TEXT,
            main=_TEXT,
            license=_one_of("MIT", "Apache-2.0", "BSD-3-Clause"),
            private=_YES,
        ),
    ),
    "deployment": (
        "Write a deployment of the image nginx with three replicas on port 80 as JSON.",
        _object(
            apiVersion={"const": "apps/v1"},
            kind={"const": "Deployment"},
            metadata=_object(name=_TEXT, namespace=_TEXT),
            spec=_object(replicas=_COUNT, containers=_list(_object(name=_TEXT, image=_TEXT, port=_COUNT), most=1)),
        ),
    ),
    "movie": (
        "Give facts about the film The Matrix as JSON.",
        _object(
            title=_TEXT,
            year=_COUNT,
            director=_TEXT,
            genres=_list(_one_of("action", "drama", "comedy", "science fiction")),
            rating=_NUMBER,
            cast=_list(_object(actor=_TEXT, role=_TEXT)),
        ),
    ),
    "recipe": (
        "Write a recipe for pancakes as JSON.",
        _object(
            title=_TEXT,
            servings=_COUNT,
            minutes=_COUNT,
            difficulty=_one_of("easy", "medium", "hard"),
            ingredients=_list(_object(name=_TEXT, amount=_NUMBER, unit=_TEXT), least=2, most=4),
            steps=_list(_TEXT, least=2, most=3),
        ),
    ),
    "event": (
        "Extract the event: the team meets on 2024-05-17 at 14:30 in room B12 for 45 minutes to plan the release.",
        _object(
            title=_TEXT,
            date={"type": "string", "format": "date"},
            start=_TEXT,
            minutes=_COUNT,
            location=_TEXT,
            attendees=_list(_TEXT),
            recurring=_YES,
        ),
    ),
    "sentiment": (
        "Analyse the review as JSON: The battery lasts for days and the screen is great, but the camera is poor.",
        _object(
            sentiment=_one_of("positive", "negative", "mixed"),
            score={"type": "number", "minimum": 0, "maximum": 1},
            aspects=_list(_object(name=_TEXT, sentiment=_one_of("positive", "negative")), least=2),
            recommended=_YES,
            summary=_TEXT,
        ),
    ),
    "address": (
        "Extract the address: 221 Baker Street, London NW1 6XE, United Kingdom, second floor.",
        _object(
            number=_COUNT, street=_TEXT, city=_TEXT, postcode=_TEXT, country=_TEXT, floor={"type": ["integer", "null"]}
        ),
    ),
    "invoice": (
        "Extract the invoice: number 2041 of 3 March 2023 from Acme Ltd to Beta GmbH, 1200 euros plus 19 percent tax.",
        _object(
            invoice_number=_TEXT,
            issue_date={"type": "string", "format": "date"},
            seller=_object(name=_TEXT),
            buyer=_object(name=_TEXT),
            net_amount=_NUMBER,
            tax_percent=_NUMBER,
            currency=_one_of("EUR", "USD", "GBP"),
        ),
    ),
    "quiz": (
        "Write two quiz questions about the planets as JSON.",
        _object(
            topic=_TEXT,
            questions=_list(
                _object(question=_TEXT, options=_list(_TEXT, least=3), answer=_TEXT, points=_COUNT), least=2, most=2
            ),
        ),
    ),
    "ticket": (
        "File a ticket as JSON: the login page shows error 500 on Firefox since this morning, all users are affected.",
        _object(
            title=_TEXT,
            description=_TEXT,
            priority=_one_of("low", "medium", "high", "critical"),
            component=_TEXT,
            labels=_list(_one_of("bug", "feature", "question")),
            assignee={"anyOf": [_TEXT, {"type": "null"}]},
        ),
    ),
    "sensor": (
        "Write three readings of a temperature sensor in a greenhouse as JSON.",
        _object(
            sensor_id=_TEXT,
            location=_TEXT,
            readings=_list(_object(hour=_COUNT, temperature=_NUMBER, humidity=_NUMBER), least=3),
            battery_low=_YES,
            unit=_one_of("celsius", "fahrenheit"),
        ),
    ),
    "shape": (
        "Describe a drawing of a circle beside a rectangle as JSON.",
        _object(
            width=_COUNT,
            height=_COUNT,
            background=_TEXT,
            shapes=_list(
                {
                    "anyOf": [
                        _object(type={"const": "circle"}, x=_COUNT, y=_COUNT, radius=_COUNT),
                        _object(type={"const": "rectangle"}, x=_COUNT, y=_COUNT, width=_COUNT, height=_COUNT),
                    ]
                },
                least=2,
            ),
            visible=_YES,
        ),
    ),
    "tree": (
        "Describe a company with a chief and two managers as a tree in JSON.",
        {
            "$defs": {"person": _object(name=_TEXT, title=_TEXT, reports=_list({"$ref": "#/$defs/person"}, least=0))},
            **_object(company=_TEXT, founded=_COUNT, employees=_COUNT, public=_YES, chief={"$ref": "#/$defs/person"}),
        },
    ),
    "workflow": (
        "Write a workflow that tests a Python project on every push as JSON.",
        _object(
            name=_TEXT,
            on=_one_of("push", "pull_request"),
            runner=_one_of("ubuntu-latest", "windows-latest", "macos-latest"),
            steps=_list(_object(name=_TEXT, run=_TEXT), least=2),
            timeout_minutes=_COUNT,
        ),
    ),
    "flight": (
        "Extract the flight: Ada Byron flies from Paris to Rome on 2024-07-01 with AF1204 in seat 12C, economy class.",
        _object(
            passenger=_TEXT,
            origin=_TEXT,
            destination=_TEXT,
            departure_date={"type": "string", "format": "date"},
            flight_number=_TEXT,
            seat=_TEXT,
            cabin_class=_one_of("economy", "business", "first"),
        ),
    ),
    "patient": (
        "Summarise as JSON: John, 58, has had chest pain for two hours, blood pressure 150 over 95, takes aspirin.",
        _object(
            patient_name=_TEXT,
            patient_age=_COUNT,
            symptoms=_list(_TEXT),
            blood_pressure=_object(systolic=_COUNT, diastolic=_COUNT),
            medications=_list(_TEXT),
            urgent=_YES,
        ),
    ),
    "book": (
        "Describe the book Pride and Prejudice as JSON.",
        _object(
            title=_TEXT,
            author=_object(first_name=_TEXT, last_name=_TEXT, birth_year=_COUNT),
            publication_year=_COUNT,
            language=_one_of("English", "French", "German"),
            themes=_list(_TEXT, least=2),
            in_print=_YES,
        ),
    ),
}


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return _object(name={"const": name}, arguments=_object(**arguments))


_CALLS = [
    _call("QueryHealthData", user_id=_TEXT, start_time=_TEXT, end_time=_TEXT),
    _call("AddReminder", token=_TEXT, content=_TEXT, time=_TEXT),
    _call("BookHotel", hotel_name=_TEXT, check_in_time=_TEXT, check_out_time=_TEXT, room_count=_COUNT),
    _call("PlayMusic", music_name=_TEXT),
    _call("AppointmentRegistration", patient_name=_TEXT, date=_TEXT, doctor_name=_TEXT),
    _call("Translate", src=_TEXT, src_lang=_one_of("en", "fr", "de"), tgt_lang=_one_of("en", "fr", "de")),
]
_REQUESTS = [
    "Remind me of the dentist on 2023-03-20 at 09:00:00; my token is abc123xyz.",
    "Book the Hilton from 2023-05-01 to 2023-05-04, two rooms please.",
    "I am patient Alice Smith and want to see Dr. Johnson on 2023-06-11.",
    "Show the health data of user J46801 from 2023-02-01 to 2023-02-28.",
    "Translate 'good morning' from English into French.",
    "Play the song Yesterday for me.",
]
_PATTERNS = {
    "date and time": (
        "When did Apollo 11 land? Give date and time.",
        r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z",
    ),
    "phone numbers": (
        "Invent four phone numbers of New York, separated by commas.",
        r"\+1 \(212\) [0-9]{3}-[0-9]{4}(, \+1 \(212\) [0-9]{3}-[0-9]{4}){3}",
    ),
    "log lines": (
        "Invent a log of a web server.",
        r'(2024-01-[0-3][0-9] \[(INFO|WARN|ERROR)\] request_id=[0-9]{4} status=(200|404|500) path="/[a-z]{3,8}"\n){5}',
    ),
    "yes or no": ("Is Paris the capital of France?", r"The answer is (yes|no), because [A-Za-z ,]{10,80}\."),
    "addresses": ("List three private network addresses.", r"(192\.168\.[0-9]{1,3}\.[0-9]{1,3}\n){3}"),
    "rows": ("List the five largest countries.", r"(\| [A-Z][a-z]{3,12} \| [0-9]{1,3} million km² \|\n){5}"),
}

CASES: dict[str, list[Case]] = {
    "schemas": [Case(name, question, {"json_schema": schema}) for name, (question, schema) in _SCHEMAS.items()],
    "calls": [
        Case(
            f"call {place}",
            f"Answer with one call of a function as JSON. {question}",
            {"json_schema": {"anyOf": _CALLS}},
        )
        for place, question in enumerate(_REQUESTS)
    ],
    "patterns": [Case(name, question, {"regex": pattern}) for name, (question, pattern) in _PATTERNS.items()],
}
FREE = [
    "Explain in a few sentences how rain is formed.",
    "Write a short story about a fox and a crow.",
    "Give three tips for learning a language.",
]
"""Questions whose answers have no form."""
