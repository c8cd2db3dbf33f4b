// SPDX-License-Identifier: Apache-2.0
#include "suite.hpp"

#include <algorithm>
#include <random>
#include <span>
#include <stdexcept>

#include "program/console.hpp"
#include "program/needles.hpp"

namespace evaluate {

namespace {

using Random = std::mt19937_64;

constexpr std::array<const char*, 40> words{
    "velvet", "copper", "lantern", "marble",   "pepper",  "anchor",  "willow", "thunder",
    "saddle", "mirror", "basket",  "candle",   "feather", "granite", "hammer", "island",
    "jacket", "kettle", "ladder",  "meadow",   "needle",  "orange",  "pillow", "quartz",
    "ribbon", "silver", "timber",  "umbrella", "violin",  "walnut",  "barrel", "canyon",
    "desert", "falcon", "garlic",  "helmet",   "ivory",   "jungle",  "magnet", "pencil"};
constexpr std::array<const char*, 32> keys{
    "apple", "bread", "chair", "dance", "eagle", "flute", "glass", "horse",
    "iron",  "juice", "knife", "lemon", "mouse", "night", "ocean", "piano",
    "queen", "river", "stone", "tiger", "uncle", "voice", "wheat", "yacht",
    "zebra", "brick", "cloud", "dream", "earth", "fence", "grape", "honey"};
constexpr std::array<const char*, 20> first_names{
    "Martin", "Helen", "Oscar", "Julia", "Victor", "Clara", "Hugo",  "Edith", "Simon", "Laura",
    "Peter",  "Nora",  "Felix", "Agnes", "Walter", "Irene", "Louis", "Diana", "Henry", "Paula"};
constexpr std::array<const char*, 20> last_names{"Ashford", "Brandt", "Castle", "Draper", "Ellis",
                                                 "Fowler",  "Grant",  "Hobbs",  "Irving", "Jensen",
                                                 "Kramer",  "Lowell", "Mercer", "Norton", "Osborn",
                                                 "Porter",  "Quincy", "Ramsey", "Slater", "Turner"};

// `count` different ones.
template <std::size_t N>
std::vector<std::string> pick(const std::array<const char*, N>& from,
                              std::size_t count,
                              Random& random) {
  std::vector<std::string> all(from.begin(), from.end());
  if (count > all.size()) throw std::runtime_error("the suite has too few words for this length");
  for (std::size_t i = 0; i < count; ++i) std::swap(all[i], all[i + random() % (all.size() - i)]);
  all.resize(count);
  return all;
}

std::string number(Random& random) {
  return std::to_string(10000 + random() % 90000);
}
std::string name(Random& random) {
  const std::string first = first_names[random() % first_names.size()];
  return first + " " + last_names[random() % last_names.size()];
}

// A fact in the form that the tasks share: "The secret number of Oslo is 42713."
struct Fact {
  std::string subject, answer;
  [[nodiscard]] std::string text() const { return "\nThe " + subject + " is " + answer + ".\n"; }
};
constexpr std::array<const char*, 3> properties{"secret number", "secret word", "keeper"};
Fact make_fact(std::size_t property, const std::string& thing, Random& random) {
  return {std::string(properties[property]) + " of " + thing,
          property == 0   ? number(random)
          : property == 1 ? words[random() % words.size()]
                          : name(random)};
}

}  // namespace

Suite suite_of(const std::string& name) {
  if (name == "small") return {name, {{1024, 8, 4}}, {0.5, 0.75, 0.9}};
  if (name == "standard") return {name, {{1024, 24, 12}, {2048, 12, 6}}, {0.5, 0.75, 0.9}};
  if (name == "full")
    return {name, {{1024, 24, 12}, {2048, 12, 6}, {4096, 6, 3}}, {0.5, 0.75, 0.9, 0.95}};
  throw std::runtime_error("unknown suite '" + name + "'; known are small, standard, full");
}

Generator::Generator(const engine::Tokenizer& tokenizer,
                     const std::string& folder,
                     std::uint32_t seed)
    : tokenizer_(&tokenizer), seed_(seed), chat_(tokenizer.find("<|im_start|>") >= 0) {
  for (auto [text, file] : {std::pair(&novel_, "novel.txt"),
                            std::pair(&proceedings_, "proceedings.txt"),
                            std::pair(&code_, "code.txt")}) {
    text->name = folder + "/" + file;
    text->tokens = tokenizer.encode(program::read_file(text->name), false);
  }
}

std::vector<Token> Generator::opening(const std::string& text) const {
  std::vector<Token> tokens;
  if (tokenizer_->add_bos()) tokens.push_back(tokenizer_->bos());
  const auto rest = encode(text);
  tokens.insert(tokens.end(), rest.begin(), rest.end());
  return tokens;
}

Turn Generator::ask(const std::string& question,
                    const std::string& lead,
                    const std::string& answer,
                    bool first) const {
  Turn turn;
  turn.question = encode(chat_ ? (first ? "\n\n" : "<|im_start|>user\n") + question +
                                     "<|im_end|>\n<|im_start|>assistant\n" + lead
                               : "\n\n" + question + "\n" + lead);
  turn.answer = answer;
  turn.reference = encode(" " + answer + (chat_ ? ".<|im_end|>\n" : "."));
  turn.most = encode(" " + answer).size() + 2;
  return turn;
}

void Generator::hide(Prompt& prompt,
                     const Text& text,
                     const std::vector<Token>& opening,
                     const std::vector<std::string>& facts,
                     const std::vector<double>& depths,
                     std::uint64_t draw) const {
  std::vector<std::vector<Token>> hidden;
  for (const std::string& fact : facts) hidden.push_back(encode(fact));
  std::size_t asked = 0;
  for (std::size_t i = 0; i < prompt.turns.size(); ++i) {
    asked += prompt.turns[i].question.size();
    if (i + 1 < prompt.turns.size()) asked += prompt.turns[i].reference.size();
  }
  auto made = program::detail::hide(
      text.tokens, text.name, opening, hidden, depths, asked, prompt.length, draw);
  prompt.context = std::move(made.context);
  prompt.facts = std::move(made.facts);
}

void Generator::copy(Prompt& prompt, double depth, std::uint64_t draw) const {
  const std::vector<Token>& text = proceedings_.tokens;
  const std::vector<Token> separator = encode("\n\n");
  const auto length = static_cast<std::size_t>(prompt.length);
  const std::size_t around = separator.size() + cue_tokens + copy_tokens;
  const std::size_t front = tokenizer_->add_bos() ? 1 : 0;
  if (length < 2 * (around + front) || text.size() < length) {
    throw std::runtime_error(proceedings_.name + " has " + std::to_string(text.size()) +
                             " tokens, which is too short for " + std::to_string(length) +
                             " tokens per prompt, or they are fewer than " +
                             std::to_string(2 * (around + front)));
  }
  const std::size_t size = length - around - front;
  const auto whole = std::span(text).subspan(draw % (text.size() - size + 1), size);
  const std::size_t passage = cue_tokens + copy_tokens;
  auto begin = static_cast<std::size_t>(depth * static_cast<double>(size - passage));
  // The cue must lie there alone, or the passage is not the only right answer.
  const auto times = [&](std::size_t at) {
    const auto cue = whole.subspan(at, cue_tokens);
    std::size_t found = 0;
    for (auto from = whole.begin();; ++from, ++found) {
      from = std::search(from, whole.end(), cue.begin(), cue.end());
      if (from == whole.end()) return found;
    }
  };
  while (begin + passage < size && times(begin) > 1) ++begin;
  if (front > 0) prompt.context.push_back(tokenizer_->bos());
  prompt.context.insert(prompt.context.end(), whole.begin(), whole.end());
  const auto cue = whole.subspan(begin, cue_tokens);
  const auto rest = whole.subspan(begin + cue_tokens, copy_tokens);
  Turn turn;
  turn.question = separator;
  turn.question.insert(turn.question.end(), cue.begin(), cue.end());
  turn.copy.assign(rest.begin(), rest.end());
  turn.answer = tokenizer_->decode(turn.copy);
  prompt.turns.push_back(std::move(turn));
  prompt.facts.emplace_back(front + begin, front + begin + passage);
}

Prompt Generator::make(std::string_view task,
                       std::int32_t length,
                       std::int32_t index,
                       std::int32_t spread) const {
  const auto at = static_cast<std::size_t>(std::ranges::find(tasks, task) - tasks.begin());
  if (at == tasks.size()) throw std::runtime_error("unknown task " + std::string(task));
  Prompt prompt;
  prompt.task = task;
  prompt.length = length;
  prompt.id = prompt.task + "-" + std::to_string(length) + "-" + std::to_string(index);
  if (seed_ != 0) prompt.id += "-seed-" + std::to_string(seed_);
  Random random((at * 100003 + static_cast<std::uint64_t>(length)) * 1000003 +
                static_cast<std::uint64_t>(index) + (std::uint64_t{seed_} << 40));
  const std::uint64_t draw = random();
  const double depth = (index % spread + 0.5) / spread;
  const std::string user = chat_ ? "<|im_start|>user\n" : "";
  if (task == "cued_copy") {
    copy(prompt, depth, draw);
    prompt.turns[0].depth = depth;
    prompt.turns[0].fact_rows = cue_tokens + copy_tokens;
    return prompt;
  }

  std::vector<std::string> facts;
  std::vector<double> depths{depth};
  std::vector<std::size_t> asked{0};  // fact of each turn
  std::vector<Token> front;
  const Text* text = &novel_;
  const auto even = [&](std::size_t count) {
    depths.clear();
    for (std::size_t i = 0; i < count; ++i)
      depths.push_back((static_cast<double>(i) + 0.5) / static_cast<double>(count));
  };
  const auto question_for = [&](const Fact& fact, bool first) {
    const bool person = fact.subject.starts_with("keeper");
    return ask((person ? "Who is the " : "What is the ") + fact.subject + "?",
               "The " + fact.subject + " is",
               fact.answer,
               first);
  };
  if (task == "key_value") {
    const auto count = static_cast<std::size_t>(std::clamp(length / 128, 1, 32));
    const auto names = pick(keys, count, random);
    asked[0] = static_cast<std::size_t>(depth * static_cast<double>(count));
    even(count);
    front = opening("The notes in this text have a word and its code.\n\n");
    std::string answer;
    for (std::size_t i = 0; i < count; ++i) {
      const std::string value = words[random() % words.size()];
      facts.push_back("\nThe code for \"" + names[i] + "\" is \"" + value + "\".\n");
      if (i == asked[0]) answer = value;
    }
    Turn turn;
    turn.question = encode("\n\nThe code for \"" + names[asked[0]] + "\" is \"");
    turn.answer = answer;
    turn.most = encode(answer).size() + 2;
    prompt.turns.push_back(std::move(turn));
  } else if (task == "identifier") {
    const auto parts = pick(words, 3, random);
    const std::string rest = parts[1] + "_" + parts[2];
    facts.push_back("\n\ninline int " + parts[0] + "_" + rest + "(int rows) {\n  return " +
                    std::to_string(2 + random() % 97) + " * rows;\n}\n\n");
    front = opening("// SPDX-License-Identifier: Apache-2.0\n");
    text = &code_;
    // Defined more than 512 tokens before it is asked for.
    const double far = (static_cast<double>(length) - 512 - 64) / length;
    if (far <= 0)
      throw std::runtime_error("identifier needs prompts of more than 576 tokens, not " +
                               std::to_string(length));
    depths[0] = depth * far;
    Turn turn;
    turn.question = encode("\n\nint main() {\n  int rows = 12;\n  rows = " + parts[0] + "_");
    turn.answer = rest;
    turn.most = encode(rest).size() + 2;
    prompt.turns.push_back(std::move(turn));
  } else if (task == "four_needles" || task == "multi_turn") {
    const bool turns = task == "multi_turn";
    const std::size_t count = turns ? 3 : 4;
    const auto things = pick(program::detail::needle_things, count, random);
    even(count);
    // The first question is for another fact from prompt to prompt.
    const auto shift = static_cast<std::size_t>(index);
    asked.clear();
    for (std::size_t i = 0; i < (turns ? count : 1); ++i) asked.push_back((shift + i) % count);
    std::vector<Fact> made;
    for (std::size_t i = 0; i < count; ++i) {
      made.push_back(make_fact(turns ? (i + shift / count) % 3 : 0, things[i], random));
      facts.push_back(made.back().text());
    }
    front = opening(user +
                    "There are important facts hidden in the text below. Find them and "
                    "remember them.\n\n");
    for (std::size_t i = 0; i < asked.size(); ++i)
      prompt.turns.push_back(question_for(made[asked[i]], i == 0));
  } else {
    const std::size_t property = task == "needle_number" ? 0 : task == "needle_word" ? 1 : 2;
    const Fact fact =
        make_fact(property, pick(program::detail::needle_things, 1, random).front(), random);
    facts.push_back(fact.text());
    front = opening(user +
                    "There is an important fact hidden in the text below. Find it and "
                    "remember it.\n\n");
    prompt.turns.push_back(question_for(fact, true));
  }
  hide(prompt, *text, front, facts, depths, draw);
  for (std::size_t i = 0; i < prompt.turns.size(); ++i) {
    prompt.turns[i].depth = depths[asked[i]];
    const auto [begin, end] = prompt.facts[asked[i]];
    prompt.turns[i].fact_rows = end - begin;
  }
  return prompt;
}

std::vector<program::Sample> Generator::samples(std::int32_t length, std::int32_t count) const {
  return program::cut_samples(proceedings_.tokens,
                              static_cast<std::size_t>(length),
                              sample_next,
                              static_cast<std::size_t>(count));
}

}  // namespace evaluate
