// SPDX-License-Identifier: Apache-2.0
#include "score_fixture.hpp"

#include <kvtrim/score/external.hpp>

#include "catch.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

using namespace score_test;

TEST_CASE("external: copies the scores of its sequence, layer and head bit for bit",
          "[external][nan]") {
  constexpr std::int32_t rows = 5;
  std::vector<float> scores(2 * 3 * 4 * rows);  // [sequences, layers, heads, rows]
  for (std::size_t i = 0; i < scores.size(); ++i) { scores[i] = static_cast<float>(i) - 50; }
  scores[7] = nan_f;
  scores[8] = -inf_f;
  scores[9] = -0.0F;
  Observation obs;
  obs.scores = SequencePlane::dense(scores.data(), 3, 4, rows);
  for (std::int32_t s = 0; s < 2; ++s) {
    for (std::int32_t l = 0; l < 3; ++l) {
      for (std::int32_t h = 0; h < 4; ++h) {
        for (const std::int32_t n : {0, 1, rows}) {
          std::vector<float> out(at(n), 77.0F);
          ExternalScorer{}.score({{}, SequenceId{s}, LayerId{l}, HeadId{h}}, obs, {}, out);
          const auto first = scores.begin() + ((s * 3 + l) * 4 + h) * rows;
          CHECK(bits_of(out) == bits_of({first, first + n}));
        }
      }
    }
  }
}

TEST_CASE("external: strides of 0 share one array among layers and heads", "[external]") {
  std::vector<float> scores{3, 1, 2};
  Observation obs;
  obs.scores = SequencePlane::dense(scores.data(), 1, 1, 3);
  obs.scores.layer_stride = obs.scores.head_stride = 0;
  std::vector<float> out(3);
  ExternalScorer{}.score({{}, SequenceId{0}, LayerId{5}, HeadId{2}}, obs, {}, out);
  CHECK(out == scores);
}

TEST_CASE("external: no scores, or elements that are not 4 bytes, are a bad observation",
          "[external][edge]") {
  CHECK(ExternalScorer{}.check({}, {}) == Status::bad_observation);
  std::vector<float> scores(3);
  Observation obs;
  obs.scores = SequencePlane::dense(scores.data(), 1, 1, 3);
  CHECK(ExternalScorer{}.check({}, obs) == Status::ok);
  obs.scores.element_bytes = 2;
  CHECK(ExternalScorer{}.check({}, obs) == Status::bad_observation);
  CHECK(ExternalScorer{}.scratch_bytes({}) == 0);
}
