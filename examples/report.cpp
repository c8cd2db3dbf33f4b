// SPDX-License-Identifier: Apache-2.0
// Results of the other programs as one HTML file that anyone can open.

#include <CLI/CLI.hpp>

#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "program/console.hpp"
#include "report/html.hpp"
#include "report/markdown.hpp"
#include "report/page.hpp"
#include "report/reader.hpp"
#include "report/results.hpp"

int main(int argc, char** argv) {
  std::vector<std::string> files;
  std::string path;
  bool markdown = false;
  CLI::App app(
      "Shows results as one HTML file: tables and pictures, nothing loaded from anywhere.");
  app.add_option("--results", files, "JSON lines of evaluate, batch, or generate --trace")
      ->required();
  auto* out_option = app.add_option("--out", path, "the HTML file");
  app.add_flag("--markdown", markdown, "print the main tables instead, as Markdown")
      ->excludes(out_option);
  CLI11_PARSE(app, argc, argv);
  return program::run("report", [&] {
    report::Reader reader;
    for (const std::string& file : files) reader.read(file);
    const report::Results results = reader.finish();
    if (markdown) {
      std::fputs(report::markdown(results).c_str(), stdout);
      return 0;
    }
    if (path.empty()) throw std::runtime_error("nothing to do: give --out or --markdown");
    for (const std::string& file : files) {
      std::error_code ignored;
      if (std::filesystem::equivalent(file, path, ignored))
        throw std::runtime_error("--out " + path + " is one of the results");
    }
    program::OutputFile out(path);
    const std::string html = report::page(results);
    out.stream() << html;
    out.commit();
    std::size_t skipped = 0;
    for (const auto& [kind, n] : results.skipped) skipped += n;
    std::printf("%s: %zu bytes", path.c_str(), html.size());
    if (skipped > 0)
      std::printf("; %s of unknown kinds passed over", report::counted(skipped, "line").c_str());
    std::printf("\n");
    return 0;
  });
}
