from tests.router.openai.public_cases.case import Case
CASES: list[Case] = []
