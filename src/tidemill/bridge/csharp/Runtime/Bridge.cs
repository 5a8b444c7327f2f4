using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.IO;

namespace Tidemill
{
    /// <summary>
    /// Joins worlds to the trainer, where there is one: each <see cref="Exchange"/> hands over what was requested and waits for the actions. Without a trainer
    /// the worlds' heuristics act. All but requests belongs to one thread.
    /// </summary>
    public sealed class Bridge : IDisposable
    {
        private const string Folder = "ml-agents"; // of the temporary folder
        private const string EditorName = "default"; // where a trainer waits for an editor
        private const int LookAfter = 200; // ms
        private static readonly World[] NoWorlds = new World[0];

        private readonly List<World> worlds = new List<World>();
        private readonly Dictionary<string, World> byName = new Dictionary<string, World>();
        private readonly List<World> newWorlds = new List<World>();
        private readonly Turns turns = new Turns();
        private readonly Stopwatch looked = Stopwatch.StartNew();
        private Image image;
        private Trainer trainer;
        private bool lost; // there was a trainer
        private bool ours; // a command has come, and is to be answered
        private bool greeted; // a first step was answered without requests

        /// <param name="memoryPath">The file at which the trainer waits: a whole path, or a name in "ml-agents" of the temporary folder; null: no trainer.</param>
        /// <param name="channels">This side's side channels.</param>
        public Bridge(string memoryPath, Channels channels = null)
        {
            Channels = channels ?? new Channels();
            if (memoryPath == null)
            {
                Reason = "there is no trainer";
                return;
            }
            string path = Path.Combine(Path.GetTempPath(), Folder, memoryPath);
            trainer = new Trainer(path, memoryPath != EditorName);
            try
            {
                trainer.Announce();
                image = Image.Open(path);
            }
            catch
            {
                trainer.Dispose();
                throw;
            }
        }

        /// <summary>
        /// Join the trainer that "--memory-path PATH" of the command line names; without it the one that waits for an editor, if there is one; else nobody.
        /// </summary>
        public static Bridge FromCommandLine(string[] arguments = null, Channels channels = null)
        {
            string[] words = arguments ?? Environment.GetCommandLineArgs();
            int at = Array.IndexOf(words, "--memory-path");
            if (at >= 0 && at + 1 == words.Length)
            {
                throw new BridgeException("--memory-path is the last word of the command line; the file's path should follow it.");
            }
            if (at >= 0)
            {
                return new Bridge(words[at + 1], channels);
            }
            return new Bridge(EditorTrainerWaits() ? EditorName : null, channels);
        }

        private static bool EditorTrainerWaits()
        {
            string path = Path.Combine(Path.GetTempPath(), Folder, EditorName);
            using (var waiting = new Trainer(path, false))
            {
                return (File.Exists(path) || waiting.Taken) && waiting.Alive(); // another simulator that has joined may have left this file for a larger one
            }
        }

        /// <summary>Whether a trainer acts; heuristics do otherwise.</summary>
        public bool HasTrainer { get { return image != null; } }

        /// <summary>Why there is no trainer; null while there is one.</summary>
        public string Reason { get; private set; }

        /// <summary>This side's side channels.</summary>
        public Channels Channels { get; }

        /// <summary>How long the trainer may think before <see cref="DeadlineException"/>; null (as at the start): any time. Its death is noticed anyway.</summary>
        public TimeSpan? Deadline { get; set; }

        /// <summary>The trainer wants all to begin anew; the requests of all worlds have been dropped.</summary>
        public event Action OnReset;

        /// <summary>Add a world, at any time; the trainer sees it at the next exchange.</summary>
        public World Add(World world)
        {
            if (byName.ContainsKey(world.Name))
            {
                throw new BridgeException("There is a world '" + world.Name + "' already; names tell worlds apart.");
            }
            byName.Add(world.Name, world);
            worlds.Add(world);
            newWorlds.Add(world);
            if (image != null && image.Shares)
            {
                world.Share();
            }
            return world;
        }

        /// <summary>The world of this name.</summary>
        public World World(string name)
        {
            World world;
            if (!byName.TryGetValue(name, out world))
            {
                throw new BridgeException("There is no world '" + name + "'; there are: " + string.Join(", ", new List<string>(byName.Keys).ToArray()) + ".");
            }
            return world;
        }

        /// <summary>
        /// Hand over what was requested in all worlds and wait for the actions. Without any request it returns at once, while the trainer goes on waiting; only
        /// its very first step is answered then, too, by worlds without agents, so that its reset can come.
        /// </summary>
        /// <returns>
        /// Whether to go on: false once a trainer has closed or died, or this side has closed (<see cref="Reason"/>). Heuristics act from then on, as they do
        /// where there never was a trainer; then it is always true.
        /// </returns>
        public bool Exchange()
        {
            foreach (World world in worlds)
            {
                BridgeException wrong = world.TakeFault();
                if (wrong != null)
                {
                    worlds.ForEach(one => one.Drop());
                    throw wrong;
                }
            }
            if (image == null)
            {
                Decide();
                return !lost;
            }
            Command command;
            try
            {
                command = AnyRequests() ? Swap() : Idle();
            }
            catch (BridgeException error) when (image != null)
            {
                Close(error.Message);
                throw;
            }
            switch (command)
            {
                case Command.Step:
                    foreach (World world in worlds)
                    {
                        world.ActionsArrived();
                    }
                    break;
                case Command.Reset:
                    foreach (World world in worlds)
                    {
                        world.Drop();
                    }
                    if (OnReset != null)
                    {
                        OnReset();
                    }
                    break;
                case Command.Close:
                    Decide();
                    break;
            }
            return !lost;
        }

        /// <summary>Tell the trainer that this simulator ends. Heuristics act in exchanges after that.</summary>
        public void Dispose()
        {
            if (image == null)
            {
                return;
            }
            if (trainer.Alive())
            {
                Close("this simulator has closed the bridge");
            }
            else
            {
                TrainerDied();
            }
        }

        private bool AnyRequests()
        {
            foreach (World world in worlds)
            {
                if (world.HasRequests)
                {
                    return true;
                }
            }
            return false;
        }

        private void Decide()
        {
            foreach (World world in worlds)
            {
                world.Decide();
            }
        }

        /// <summary>Give the trainer what was requested and take its answer, or a first command that was no step.</summary>
        private Command Swap()
        {
            Command command = ours ? Command.Step : Await(true);
            if (command == Command.Step && image.Closed)
            {
                command = TrainerClosed();
            }
            if (command != Command.Step)
            {
                return command;
            }
            Answer();
            command = Await(true);
            if (command == Command.Step)
            {
                image.ReadActions();
            }
            return command;
        }

        private void Answer()
        {
            image.Prepare(Channels.Outgoing(), newWorlds);
            newWorlds.Clear();
            image.WriteRows();
            ours = false;
            image.HandOver();
        }

        /// <summary>Without requests: take a first command that has come, and look now and then whether the trainer is still there.</summary>
        private Command Idle()
        {
            if (!ours && image.Mine)
            {
                Command command = Await(false);
                if (command == Command.Step && !greeted)
                {
                    greeted = true; // a trainer resets only after an answer, and some worlds have agents only after a reset
                    Answer();
                }
                return command == Command.Query ? Command.Step : command;
            }
            if (looked.ElapsedMilliseconds < LookAfter)
            {
                return Command.Step;
            }
            looked.Reset();
            looked.Start();
            return image.Closed ? TrainerClosed() : trainer.Alive() ? Command.Step : TrainerDied();
        }

        /// <summary>Wait for the turn, and what the trainer wants of it. Who is not patient gets Query where nothing else has come.</summary>
        private Command Await(bool patient)
        {
            while (true)
            {
                if (!patient && !image.Mine)
                {
                    return Command.Query;
                }
                if (!turns.Wait(image, trainer, Deadline))
                {
                    return TrainerDied();
                }
                Command command;
                if (!image.Take(out command))
                {
                    continue; // the trainer goes on in another file
                }
                if (command == Command.Close)
                {
                    return TrainerClosed();
                }
                ours = true;
                Channels.Incoming(image.TakeChannelBytes());
                if (command != Command.Query)
                {
                    return command;
                }
                image.Prepare(Channels.Outgoing(), NoWorlds);
                ours = false;
                image.HandOver();
            }
        }

        private Command TrainerClosed()
        {
            if (!trainer.Tidies)
            {
                image.Delete();
            }
            Leave("the trainer has closed the bridge");
            return Command.Close;
        }

        private Command TrainerDied()
        {
            if (!trainer.Tidies)
            {
                image.Delete();
            }
            else
            {
                trainer.RemoveDead();
            }
            Leave("the trainer has died");
            return Command.Close;
        }

        /// <summary>Tell the trainer that nothing more comes; the files are then its own to delete.</summary>
        private void Close(string reason)
        {
            image.Close();
            Leave(reason);
        }

        private void Leave(string reason)
        {
            image.Dispose();
            trainer.Dispose();
            image = null;
            trainer = null;
            lost = true;
            Reason = reason;
        }
    }
}
