// SPDX-License-Identifier: Apache-2.0
// A policy as a word on the command line: it is made, or refused with words.
#include "fuzz/fuzz.hpp"
#include "program/policy_spec.hpp"

#include <stdexcept>
#include <string>

KVTRIM_FUZZ_TARGET(policy_spec) {
  const std::string text(input.begin(), input.end());
  try {
    const program::PolicySpec spec(text);
    kvtrim::fuzz::require(spec.text() == text, "a SPEC is another");
    const std::int32_t keep = spec.rows_to_keep(100, 0.5);
    kvtrim::fuzz::require(keep >= 1, "nothing stays");
    static_cast<void>(spec.make(keep, kvtrim::SinkForm::pages));
  } catch (const std::invalid_argument& error) {
    kvtrim::fuzz::require(error.what()[0] != '\0', "no reason");
  }
}
