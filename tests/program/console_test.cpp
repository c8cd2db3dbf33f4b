// SPDX-License-Identifier: Apache-2.0
#include "program/console.hpp"

#include <csignal>
#include <filesystem>
#include <fstream>
#include <new>
#include <stdexcept>
#include <string>

#include "catch.hpp"
#include "support.hpp"

using Catch::Matchers::ContainsSubstring;
using program::OutputFile;
using program_test::Folder;
using program_test::read_text;

TEST_CASE("output file: nothing is at its path before commit, all of it after", "[program]") {
  const Folder folder;
  {
    OutputFile out(folder.file("a"));
    out.stream() << "one\n" << std::flush;
    CHECK_FALSE(std::filesystem::exists(folder.file("a")));
    out.stream() << "two\n";
    out.commit();
    CHECK(read_text(folder.file("a")) == "one\ntwo\n");
  }
  CHECK(read_text(folder.file("a")) == "one\ntwo\n");
  CHECK(folder.files() == 1);
}

TEST_CASE("output file: an exception before commit leaves neither the file nor its part",
          "[program][edge]") {
  const Folder folder;
  try {
    OutputFile out(folder.file("a"));
    out.stream() << "half" << std::flush;
    CHECK(folder.files() == 1);
    throw program::Interrupted();
  } catch (const program::Interrupted&) {}
  CHECK(folder.files() == 0);
}

TEST_CASE("output file: an older file stays as it was unless the new one is committed",
          "[program][edge]") {
  const Folder folder;
  const std::string path = folder.with("a", "old");
  {
    OutputFile out(path);
    out.stream() << "new" << std::flush;
    CHECK(read_text(path) == "old");
  }
  CHECK(read_text(path) == "old");
  CHECK(folder.files() == 1);
  OutputFile out(path);
  out.stream() << "new";
  out.commit();
  CHECK(read_text(path) == "new");
}

TEST_CASE("output file: a path that cannot be written is refused at once, by name",
          "[program][edge]") {
  const Folder folder;
  CHECK_THROWS_WITH(OutputFile(folder.file("missing/a")),
                    ContainsSubstring("cannot write " + folder.file("missing/a")));
  std::filesystem::create_directory(folder.file("b"));
  CHECK_THROWS_WITH(OutputFile(folder.file("b")),
                    ContainsSubstring("cannot write " + folder.file("b") + ": it is a folder"));
  CHECK(folder.files() == 1);
}

TEST_CASE("output file: a write that failed is an error of commit, and leaves nothing",
          "[program][edge]") {
  const Folder folder;
  {
    OutputFile out(folder.file("a"));
    out.stream().setstate(std::ios::badbit);  // as a full disk does
    CHECK_THROWS_WITH(out.commit(), ContainsSubstring("cannot write"));
  }
  CHECK(folder.files() == 0);
  {
    OutputFile out(folder.file("a"));
    std::filesystem::create_directory(folder.file("a"));  // comes in between
    std::ofstream(folder.file("a/b")) << "x";
    CHECK_THROWS_WITH(out.commit(), ContainsSubstring("cannot write " + folder.file("a") + ": "));
  }
  CHECK(folder.files() == 1);
}

TEST_CASE("read_file: all bytes of a file, none of an empty one", "[program][edge]") {
  const Folder folder;
  const std::string bytes("a\r\n\0b\xFF\n\n", 9);
  CHECK(program::read_file(folder.with("a", bytes)) == bytes);
  CHECK(program::read_file(folder.with("b", "")).empty());
}

TEST_CASE("read_file: what cannot be read is named", "[program][edge]") {
  const Folder folder;
  CHECK_THROWS_WITH(program::read_file(folder.file("a")),
                    ContainsSubstring("cannot read " + folder.file("a")));
  CHECK_THROWS_WITH(program::read_file(folder.file("")),
                    ContainsSubstring("cannot read " + folder.file("")));
}

TEST_CASE("run: the body's status, 1 for an error, 130 for an interruption", "[program]") {
  CHECK(program::run("test", [] { return 0; }) == 0);
  CHECK(program::run("test", [] { return 7; }) == 7);
  CHECK(program::run("test", []() -> int { throw std::runtime_error("an error"); }) == 1);
  CHECK(program::run("test", []() -> int { throw std::bad_alloc(); }) == 1);
  CHECK(program::run("test", []() -> int { throw program::Interrupted(); }) == 130);
}

TEST_CASE("check_interrupt: throws once Ctrl-C was pressed, and not before", "[program]") {
  for (const int signal : {SIGINT, SIGTERM}) {
    program::detail::interrupted = 0;
    program::catch_interrupt();
    CHECK_NOTHROW(program::check_interrupt());
    REQUIRE(std::raise(signal) == 0);
    CHECK_THROWS_AS(program::check_interrupt(), program::Interrupted);
  }
  program::detail::interrupted = 0;
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
}
