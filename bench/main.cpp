// SPDX-License-Identifier: Apache-2.0
// Google Benchmark's flags, context and JSON, with the columns that matter on a console.

#include <benchmark/benchmark.h>

#include <Eigen/Core>

#include <cstdio>
#include <string>
#include <vector>

namespace kvtrim_bench {
void print_workspaces();
}

namespace {

class Table : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context& context) override {
    std::ostream& err = GetErrorStream();
    PrintBasicContext(&err, context);
    std::printf("%-86s %10s %7s %7s %9s %8s\n",
                "operation/axes",
                "time",
                "ratio",
                "spread",
                "GFLOP/s",
                "GB/s");
    return true;
  }
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (run.error_occurred) {
        std::printf("%-86s %s\n", run.run_name.function_name.c_str(), run.error_message.c_str());
        continue;
      }
      const double seconds =
          run.GetAdjustedRealTime() / benchmark::GetTimeUnitMultiplier(run.time_unit);
      std::printf("%-86s %s %s %s %s %s\n",
                  run.run_name.function_name.c_str(),
                  time(seconds).c_str(),
                  column(run, "ratio", "%7.3f", 1, 7).c_str(),
                  column(run, "spread", "%6.1f%%", 100, 7).c_str(),
                  column(run, "GFLOP/s", "%9.1f", 1, 9).c_str(),
                  column(run, "GB/s", "%8.2f", 1, 8).c_str());
      std::fflush(stdout);
    }
  }

 private:
  static std::string time(double seconds) {
    char text[32];
    if (seconds < 1e-5) {
      std::snprintf(text, sizeof text, "%7.0f ns", seconds * 1e9);
    } else if (seconds < 1e-2) {
      std::snprintf(text, sizeof text, "%7.1f us", seconds * 1e6);
    } else {
      std::snprintf(text, sizeof text, "%7.1f ms", seconds * 1e3);
    }
    return text;
  }
  static std::string column(
      const Run& run, const char* name, const char* format, double factor, std::size_t width) {
    const auto found = run.counters.find(name);
    if (found == run.counters.end()) { return std::string(width, ' '); }
    char text[32];
    std::snprintf(text, sizeof text, format, found->second.value * factor);
    return text;
  }
};

}  // namespace

int main(int argc, char** argv) {
  benchmark::AddCustomContext("compiler", KVTRIM_BENCH_COMPILER);
  benchmark::AddCustomContext("flags", KVTRIM_BENCH_FLAGS);
  benchmark::AddCustomContext("simd", Eigen::SimdInstructionSetsInUse());
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) { return 1; }
  Table table;
  benchmark::RunSpecifiedBenchmarks(&table);
  kvtrim_bench::print_workspaces();
  benchmark::Shutdown();
  return 0;
}
