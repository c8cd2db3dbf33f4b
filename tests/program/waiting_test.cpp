// SPDX-License-Identifier: Apache-2.0

// The programs on a machine whose cores are busy.
#include "program/waiting.hpp"

#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "catch.hpp"
#include "support.hpp"
#include "tiny_model.hpp"

using program_test::Folder;
using program_test::Process;

namespace {

/// Two cores, or the one that there is, for this process and what it starts; each has a loop that never ends.
class BusyCores {
 public:
  BusyCores() {
    sched_getaffinity(0, sizeof before_, &before_);
    cpu_set_t two;
    CPU_ZERO(&two);
    for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&two) < 2; ++cpu)
      if (CPU_ISSET(cpu, &before_)) CPU_SET(cpu, &two);
    sched_setaffinity(0, sizeof two, &two);
    for (const Folder* folder : {&first_, &second_})
      loops_.emplace_back(*folder, "/bin/sh", program_test::Arguments{"-c", "while :; do :; done"});
  }
  BusyCores(const BusyCores&) = delete;
  BusyCores& operator=(const BusyCores&) = delete;
  ~BusyCores() {
    for (Process& loop : loops_) kill(loop.id(), SIGKILL), loop.wait();
    sched_setaffinity(0, sizeof before_, &before_);
  }

 private:
  cpu_set_t before_{};
  Folder first_, second_;
  std::vector<Process> loops_;
};

/// A variable of the environment, as it was again when the object goes.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    value != nullptr ? setenv(name, value, 1) : unsetenv(name);
  }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;
  ~Variable() { old_ ? setenv(name_, old_->c_str(), 1) : unsetenv(name_); }

 private:
  const char* name_;
  std::optional<std::string> old_;
};

// CPU seconds of a run of 100 tokens.
double cpu_seconds(const std::string& model) {
  const Folder folder;
  const Process process(folder,
                        KVTRIM_GENERATE,
                        {"--model",
                         model,
                         "--prompt",
                         "x",
                         "--policy",
                         "streaming:sinks=4,budget=64",
                         "--in-cache",
                         "--tokens",
                         "100"});
  int status = -1;
  rusage used{};
  REQUIRE(wait4(process.id(), &status, 0, &used) == process.id());
  REQUIRE(status == 0);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

}  // namespace

TEST_CASE("waiting: on busy cores a program does not spin, unless the user asks for it",
          "[program][fault]") {
  const Folder folder;
  const std::string model = program_test::write_model(folder, "m.gguf", program_test::tiny_model());
  const Variable two_threads("OMP_NUM_THREADS", "2");
  const BusyCores busy;
  const auto run = [&](const char* policy) {
    const Variable chosen("OMP_WAIT_POLICY", policy);
    double all = 0;  // of one run alone, the scheduler decides
    for (int i = 0; i < 5; ++i) { all += cpu_seconds(model); }
    return all;
  };
  const double asleep = run("passive");
  const double clean = run(nullptr);
  const double spinning = run("active");
  INFO(asleep << " " << clean << " " << spinning);
  CHECK(clean < 3 * asleep);
  CHECK(spinning > clean);
}
