// SPDX-License-Identifier: Apache-2.0
#pragma once

// Device memory for tests, the same for a GPU and for the emulator. Exactly as large as requested: under the emulator
// touching the first byte after it is an error that AddressSanitizer or the race checker reports.

#include <kvtrim/cuda/detail/device.hpp>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <span>
#include <string>
#include <vector>

namespace kvtrim::test {

/// An array of trivially copyable `T` in device memory. Ends the program if CUDA fails: a test cannot go on.
template <class T>
class DeviceBuffer {
 public:
  /// Memory that has not been written yet.
  explicit DeviceBuffer(std::size_t count, [[maybe_unused]] const char* name = "device buffer")
      : count_(count) {
#if defined(KVTRIM_EMULATED)
    data_ = static_cast<T*>(emulator::device_allocate(count * sizeof(T), name));
#else
    if (cudaMalloc(reinterpret_cast<void**>(&data_), count == 0 ? 1 : count * sizeof(T)) !=
        cudaSuccess) {
      std::abort();
    }
#endif
  }
  explicit DeviceBuffer(const std::vector<T>& values, const char* name = "device buffer")
      : DeviceBuffer(values.size(), name) {
    upload(values);
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() {
#if defined(KVTRIM_EMULATED)
    emulator::device_free(data_);
#else
    cudaFree(data_);
#endif
  }

  /// \pre not more values than the buffer has room for
  void upload(const std::vector<T>& values) { copy_in(values.data(), values.size()); }
  /// Sets every byte.
  void fill(int byte) {
    if (count_ == 0) { return; }
#if defined(KVTRIM_EMULATED)
    std::memset(static_cast<void*>(data_), byte, count_ * sizeof(T));
    emulator::device_written(data_, count_ * sizeof(T));
#else
    if (cudaMemset(data_, byte, count_ * sizeof(T)) != cudaSuccess) { std::abort(); }
#endif
  }
  /// What is in it once the device has nothing left to do.
  [[nodiscard]] std::vector<T> download() const {
    std::vector<T> values(count_);
    if (count_ == 0) { return values; }
#if defined(KVTRIM_EMULATED)
    std::memcpy(static_cast<void*>(values.data()), data_, count_ * sizeof(T));
#else
    if (cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost) !=
        cudaSuccess) {
      std::abort();
    }
#endif
    return values;
  }

  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return count_; }
  [[nodiscard]] std::span<T> span() const { return {data_, count_}; }

 private:
  void copy_in(const T* values, std::size_t count) {
    if (count > count_) { std::abort(); }
    if (count == 0) { return; }
#if defined(KVTRIM_EMULATED)
    std::memcpy(static_cast<void*>(data_), values, count * sizeof(T));
    emulator::device_written(data_, count * sizeof(T));
#else
    if (cudaMemcpy(data_, values, count * sizeof(T), cudaMemcpyHostToDevice) != cudaSuccess) {
      std::abort();
    }
#endif
  }

  T* data_ = nullptr;
  std::size_t count_ = 0;
};

/// What to add to the message about a launch that failed.
[[nodiscard]] inline std::string device_message() {
#if defined(KVTRIM_EMULATED)
  return emulator::message();
#else
  return cudaGetErrorString(cudaPeekAtLastError());
#endif
}

/// Waits for the device; whether every launch since the last call ended well.
[[nodiscard]] inline cudaError_t finish() {
#if defined(KVTRIM_EMULATED)
  return cudaSuccess;  // a launch that fails says so itself
#else
  return cudaDeviceSynchronize();
#endif
}

}  // namespace kvtrim::test
