// SPDX-License-Identifier: Apache-2.0
// Files that the programs read: prompts, samples, results and traces for the report, a model's config.json. Each is read, or
// refused with words that name the file. The first byte says which.
#include "fuzz/fuzz.hpp"
#include "program/eval_data.hpp"
#include "program/model_shapes.hpp"
#include "report/reader.hpp"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

KVTRIM_FUZZ_TARGET(json_lines) {
  if (input.empty()) { return; }
  static const std::string path =
      (std::filesystem::temp_directory_path() / ("kvtrim_fuzz_" + std::to_string(getpid())))
          .string();
  {
    std::ofstream out(path, std::ios::binary | std::ios::trunc);
    out.write(reinterpret_cast<const char*>(input.data()) + 1,
              static_cast<std::streamsize>(input.size() - 1));
  }
  try {
    switch (input[0] % 4) {
      case 0:
        static_cast<void>(program::read_needles(path, 0, 0));
        break;
      case 1:
        static_cast<void>(program::read_samples(path, 0));
        break;
      case 2: {
        report::Reader reader;
        reader.read(path);
        static_cast<void>(reader.finish());
        break;
      }
      default:
        static_cast<void>(program::read_config_json(path));
    }
  } catch (const std::runtime_error& error) {
    kvtrim::fuzz::require(error.what()[0] != '\0', "no reason");
  } catch (const std::invalid_argument& error) {  // a shape that cannot be
    kvtrim::fuzz::require(error.what()[0] != '\0', "no reason");
  }
  std::filesystem::remove(path);
}
